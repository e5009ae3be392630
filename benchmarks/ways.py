"""The compared ways to bring a trainer's weights into an engine: each has a `run`, collective on all ranks."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.full_tensors import load_full_tensors
from benchmarks.peer_mbridge import Counter as Received
from benchmarks.peer_mbridge import Exporter, on_this_platform
from benchmarks.subject import TrainerAndEngine
from megarl.distributed.exchange import together
from megarl.models.trainer import padded_vocab_size
from megarl.reshard.executor import Reshard
from megarl.reshard.layout import placement_of
from megarl.reshard.plan import RankPlan, Transfer, aligned
from megarl.reshard.planner import lower_bound, plan_between


class Direct:
    """The way of megarl: every box goes from the shard that has it to the shard that needs it."""

    def __init__(self, subject: TrainerAndEngine, *, bucket_bytes: int, ranks_per_node: int) -> None:
        learner = subject.learner
        engine = subject.engine
        self._learner = learner
        self._engine = engine
        rank = dist.get_rank()
        sources = together(learner.layout)
        destinations = together(engine.weights.layout)
        self.plan = plan_between(
            sources, destinations, rank=rank, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes
        )
        self.bytes_lower_bound = lower_bound(placement_of(sources), placement_of(destinations), rank=rank)
        self.bytes_received = self.plan.bytes_received
        self.reshard = Reshard(self.plan, device=learner.device)

    def run(self) -> None:
        """Update the engine."""
        with self._engine.receive_weights() as destination, self._learner.weights() as tensors:
            self.reshard.run(tensors, destination)
        with self._engine.generating():
            pass

    def run_with_new_buckets(self) -> None:
        """Run with newly allocated buckets, so that a memory measurement includes them."""
        del self.reshard
        self.reshard = Reshard(self.plan, device=self._learner.device)
        self.run()


class FullTensors:
    """The usual way: mbridge gathers the full tensors on every rank, and vLLM's loaders keep the rank's shards.

    Steps that trainers put between the two (buckets, shared memory handles, a server) are left out, in its favour.
    """

    def __init__(self, subject: TrainerAndEngine, hf_config: Mapping[str, Any]) -> None:
        learner = subject.learner
        self._learner = learner
        self._engine = subject.engine
        self._exporter = Exporter(
            dict(hf_config),
            dtype=learner.modules[0].config.params_dtype,
            padded_vocab_size=padded_vocab_size(learner.architecture.vocab_size, learner.mesh.tp_size),
        )
        with Received() as counter:
            self.run()
        self.bytes_received = counter.bytes_received

    @torch.no_grad()
    def run(self) -> None:
        """Update the engine."""
        with self._learner.weights(), on_this_platform():
            load_full_tensors(self._engine, self._exporter.export(self._learner.modules))


class PlainCopy:
    """A copy, within this rank's memory, of as many bytes as its engine's shards have, tensor by tensor."""

    def __init__(self, subject: TrainerAndEngine) -> None:
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        for piece in subject.engine.weights.layout():
            sizes[piece.param] = sizes.get(piece.param, 0) + piece.box.numel
            dtypes[piece.param] = piece.dtype
        self._source, self._destination = (
            [torch.zeros(size, dtype=dtypes[param], device=subject.learner.device) for param, size in sizes.items()]
            for _ in range(2)
        )
        self.num_bytes = sum(tensor.nbytes for tensor in self._source)

    def run(self) -> None:
        """Copy all tensors."""
        torch._foreach_copy_(self._destination, self._source)
        synchronize(self._destination)


class Exchange:
    """The messages of a plan, wave by wave, between the same ranks and of the same sizes, from and to one buffer each.

    It waits for the messages of a wave before it sends those of the next, and copies nothing else.
    """

    def __init__(self, plan: RankPlan, device: torch.device) -> None:
        ways = (lambda wave: wave.sends), (lambda wave: wave.receives)
        self._sizes = [[_by_peer(of(wave)) for of in ways] for wave in plan.waves]  # of each wave, by peer
        longest = max((sum(way.values()) for wave in self._sizes for way in wave), default=0)
        self._sent, self._received = (torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(2))

    def run(self) -> None:
        """Exchange all messages."""
        for sends, receives in self._sizes:
            messages = [
                dist.P2POp(operation, data, peer)
                for operation, buffer, sizes in (
                    (dist.irecv, self._received, receives),
                    (dist.isend, self._sent, sends),
                )
                for peer, data in zip(sizes, buffer[: sum(sizes.values())].split([*sizes.values()]), strict=True)
            ]
            for work in dist.batch_isend_irecv(messages) if messages else []:
                work.wait()
        synchronize([self._sent])


def _by_peer(transfers: Sequence[Transfer]) -> dict[int, int]:
    """Return the bytes for or from each peer, in the order in which a run sends them."""
    sizes = Counter[int]()
    for transfer in sorted(transfers, key=attrgetter("peer")):
        sizes[transfer.peer] += aligned(transfer.num_bytes)
    return dict(sizes)


class Repack:
    """The engine's own work on new weights: packing them for its kernels.

    It leaves the engine with zeros, so that a way that skips a parameter afterwards is detected.
    """

    def __init__(self, subject: TrainerAndEngine) -> None:
        self._weights = subject.engine.weights
        self._params = list(dict.fromkeys(piece.param for piece in self._weights.layout()))
        self.seconds_to_ignore = 0.0

    def run(self) -> None:
        """Pack every parameter; `seconds_to_ignore` is the time of filling them."""
        self.seconds_to_ignore = 0.0
        with self._weights.update():
            for param in self._params:
                start = time.perf_counter()
                synchronize([self._weights.open(param).zero_()])
                self.seconds_to_ignore += time.perf_counter() - start
                self._weights.close(param)


def synchronize(tensors: list[Tensor]) -> None:
    """Wait for the device of these tensors."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
