"""vLLM in the trainer's own processes: one engine replica per `tensor_model_parallel_size` neighbouring ranks.

All ranks of a replica run the same requests in lockstep, each on its shard of the weights. Replicas are independent of
each other. The engine starts without weights and receives them by a sync before each generation.
Invariant: no token is generated from weights or cached keys of an earlier sync.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from megarl.batch import Generation, Group, Prompt
from megarl.distributed.exchange import together
from megarl.distributed.sharded import Shares
from megarl.models.architecture import Architecture, hf_shapes
from megarl.platform.device import on_cuda
from megarl.platform.errors import UserError
from megarl.reshard.quantised import KEY
from megarl.rollout import patches, segments
from megarl.rollout.arguments import ENGINE_KWARGS, cpu_arguments, engine_settings, is_eager, llm_arguments
from megarl.rollout.config import RolloutSection
from megarl.rollout.kv_cache import check_cache_tokens
from megarl.rollout.release import check_family, check_release, installed_release
from megarl.rollout.replica_queue import Finished, Replica, ReplicaQueue
from megarl.rollout.requests import RequestParams
from megarl.rollout.routes import RouteStore
from megarl.rollout.sampling import Sampling
from megarl.rollout.window import Window, Windows, exchange

if TYPE_CHECKING:
    from megarl.rollout.destination import EngineWeights

T = TypeVar("T")

KEYS = (  # for readers of a vLLM message that advises to change them
    "vLLM's gpu_memory_utilization, max_num_seqs and max_num_batched_tokens are keys of actor_rollout_ref.rollout; its "
    "max_model_len is data.max_prompt_length and data.max_response_length together"
)


class RolloutEngine:
    """This rank's part of one engine replica.

    Collective over the default process group, which must exist already; the launcher's RANK and LOCAL_RANK must be in
    the environment.
    """

    weights: "EngineWeights"
    """This rank's share of the engine's weights, the destination of a sync."""
    room: int
    """The samples that every replica draws at once, however long they become."""
    _version = 0  # finished steps that the weights come from
    _has_weights = False  # since the last sleep

    def __init__(
        self,
        section: RolloutSection,
        *,
        model_dir: Path,
        architecture: Architecture,
        stop_token_ids: Sequence[int],
        max_model_len: int,
        max_sequences: int | None = None,
        trust_remote_code: bool = False,
        overrides: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Start the engine, asleep.

        `model_dir` holds at least config.json, some of whose fields `overrides` replace; `architecture` is the model
        that it describes. `max_model_len` limits prompt and response together, in tokens. `max_sequences` is the most
        samples that one `generate` requests from a replica; on CPU it limits the KV cache.

        Raises:
            UserError: sizes do not fit, or the KV cache does not hold one sequence of `max_model_len`.
        """
        self.tp_size = _divisor(section.tensor_model_parallel_size)
        release = check_release(installed_release())
        patches.prepare_environment()
        # vLLM reads its environment when it is imported: nothing that imports it may come before this line.
        from vllm.platforms import current_platform

        from megarl.rollout import reload
        from megarl.rollout.destination import EngineWeights
        from megarl.rollout.layout import trace

        reload.check_platform()
        prefix = segments.claim()
        patches.name_message_queues(prefix)
        self._section = section
        self._stop = list(stop_token_ids)
        self.max_model_len = max_model_len
        on_cpu: bool = current_platform.is_cpu()
        check_family(architecture.family, release, on_cpu=on_cpu)
        self._may_compile = not (on_cpu and is_eager(section, on_cpu=on_cpu))
        arguments = llm_arguments(
            section,
            model_dir=model_dir,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            on_cpu=on_cpu,
            overrides={**overrides, **engine_settings(architecture)},
        )
        if on_cpu:
            patches.mend_cpu_build(prefix if segments.may_spin() else None)
            sequences = min(section.max_num_seqs, max_sequences or section.max_num_seqs)
            cache = cpu_arguments(section, architecture, num_sequences=sequences, max_model_len=max_model_len)
            arguments = cache | arguments
        self._routes: RouteStore | None = None

        def keep_routes(worker: Any) -> None:
            self._routes = RouteStore(worker, architecture, with_scores=section.routing_replay == "engine_scores")

        keeping = patches.cache_ready(keep_routes) if section.routing_replay != "none" else nullcontext()
        with patches.compilation(allowed=self._may_compile), keeping:
            self._llm = _start(arguments)
        self.room = self._room()
        worker: Any = self._llm.collective_rpc(lambda worker: worker)[0]
        model = worker.get_model()
        if getattr(model.config, KEY, None) is None:  # vLLM's loader of gpt-oss takes a null for a table
            vars(model.config).pop(KEY, None)
        layout = trace(model, hf_shapes(architecture), worker.device)
        self.weights = EngineWeights(model, layout, vllm_config=worker.vllm_config)
        self._sleep()

    @property
    def num_replicas(self) -> int:
        """The number of independent copies of the engine in this job."""
        return dist.get_world_size() // self.tp_size

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to."""
        return dist.get_rank() // self.tp_size

    @property
    def tp_rank(self) -> int:
        """This rank's position in its replica."""
        return dist.get_rank() % self.tp_size

    @property
    def shares(self) -> Shares:
        """The shares of drawn samples: the ranks of a replica have the same."""
        return Shares.blocks(self.tp_size, group=self.host_group)

    @property
    def no_routes(self) -> Tensor | None:
        """The routes of no place, as in `Rollouts`; None: the engine keeps none."""
        return self._routes.nothing if self._routes else None

    @property
    def host_group(self) -> Any:
        """The ranks of this replica, for data in host memory."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    @contextmanager
    def receive_weights(self, *, version: int = 0) -> Iterator["EngineWeights"]:
        """Take memory for the weights, and yield the destination, to which the block writes all of them.

        Weights get memory before the KV cache does, so that the trainer can still hold its own weights during the sync.

        Args:
            version: the number of finished steps that the weights come from.

        Raises:
            RuntimeError: the block left a parameter unwritten.
        """
        self._wake("weights")
        with self.weights.update():
            yield self.weights
        self._version = version
        self._has_weights = True

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Generate within the block with the weights that were received. The engine then returns all memory.

        After an error within the block the engine stays as it is: the run is over, and putting a broken engine to sleep
        could hide the cause.

        Raises:
            RuntimeError: no weights were received since the last block, or vLLM kept keys of older weights.
        """
        if not self._has_weights:
            raise RuntimeError("the engine has no weights since it slept: call receive_weights before generating")
        self._wake("kv_cache")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop keys cached under the old weights: a request is still running")
        yield
        self._has_weights = False
        self._sleep()

    def exchange(self, work: Callable[[], Window]) -> Windows:
        """Work with this rank's replica, and return the windows of all replicas, as `window.exchange` does."""
        return exchange(work, range(self.tp_rank, dist.get_world_size(), self.tp_size))

    def on_all_ranks(self, generate: Callable[[], T]) -> list[T]:
        """Return what `generate` returns on each replica, in their order, on every rank. Collective.

        If every replica is one rank, an error is raised on all ranks, as by `together`. In a larger replica, the other
        ranks may wait for the failed rank in a collective of vLLM, and no message reaches them there. The failed rank
        then raises its error at once, which ends the job.
        """
        if self.tp_size == 1:
            return together(generate)
        mine = generate()
        return together(lambda: mine if self.tp_rank == 0 else None)[:: self.tp_size]  # type: ignore[return-value]

    def name(self, replica: int) -> str:
        """Return the name of a replica and its ranks, for messages."""
        first = replica * self.tp_size
        size = self.tp_size
        return f"engine replica {replica} ({f'ranks {first}-{first + size - 1}' if size > 1 else f'rank {first}'})"

    def open_queue(
        self,
        sampling: Sampling,
        *,
        max_tokens: int,
        step: int,
        log_probs: bool | None = None,
        on_finished: Finished | None = None,
        final_only: bool = True,
        with_routes: bool = False,
    ) -> ReplicaQueue:
        """Return an empty queue of samples of this replica, up to `max_tokens` of each. Arguments as `generate`.

        Every use of it is collective over the ranks of the replica. `final_only` False keeps the tokens of samples that
        are stopped. `with_routes` adds the routes of samples if the engine keeps them.
        """
        section = self._section
        params = RequestParams(
            sampling=sampling,
            max_tokens=max_tokens,
            max_model_len=self.max_model_len,
            seed=section.seed,
            stop=() if section.ignore_eos else self._stop,
            log_probs=section.compares if log_probs is None else log_probs,
            final_only=final_only,
        )
        replica = Replica(
            name=self.name(self.replica),
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            num_slots=section.max_num_seqs,
            may_compile=self._may_compile,
        )
        return ReplicaQueue(
            self._llm.llm_engine,
            params,
            replica,
            step=step,
            weight_version=self._version,
            on_finished=on_finished,
            routes=self._routes if with_routes else None,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        max_tokens: int,
        step: int,
        first_sample: int = 0,
        log_probs: bool | None = None,
    ) -> list[Generation]:
        """Draw `sampling.n` samples of each of this replica's `prompts`. Collective over the ranks of the replica.

        A request's seed follows from the section's seed, `step`, the prompt's index and the sample's number.

        `first_sample` is the number of each prompt's first sample. `log_probs` None returns log-probabilities if the
        trainer can compute the same. Returns the samples prompt by prompt, sample by sample.

        Raises:
            UserError: a prompt leaves no room for `max_tokens`.
            RuntimeError: vLLM failed, or returned other samples than it was asked for; names replica and prompts.
        """
        queue = self.open_queue(sampling, max_tokens=max_tokens, step=step, log_probs=log_probs)
        numbers = range(first_sample, first_sample + sampling.n)
        queue.add([Group.new(prompt, numbers, started=step, place=place) for place, prompt in enumerate(prompts)])
        return sorted(queue.run(), key=lambda generation: (generation.prompt, generation.sample))

    def close(self) -> None:
        """Shut the engine down, while the process groups it uses still exist."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        with patches.frozen():
            self._llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()

    def _room(self) -> int:
        cache = self._llm.llm_engine.vllm_config.cache_config
        num_blocks = cache.num_gpu_blocks - 1  # vLLM keeps one
        check_cache_tokens(num_blocks * cache.block_size, self.max_model_len)
        blocks_of_sample = -(-self.max_model_len // cache.block_size)
        return min(together(lambda: min(self._section.max_num_seqs, num_blocks // blocks_of_sample)))

    def _wake(self, tag: str) -> None:
        if self._section.free_cache_engine:
            if on_cuda():
                torch.cuda.empty_cache()  # what the trainer has left; vLLM takes memory from the device
            self._llm.wake_up(tags=[tag])

    def _sleep(self) -> None:
        if self._section.free_cache_engine:
            self._llm.sleep(level=2)  # level 1 would keep weights on the host that the next sync replaces anyway


def _start(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    patches.draw_together()
    patches.keep_log_probs_in_arrays()
    try:
        with patches.start_isolated():
            return LLM(**arguments)
    except ValidationError as error:
        raise UserError(_refused(error, arguments)) from error
    except ValueError as error:
        raise UserError(f"vLLM does not start on rank {dist.get_rank()}: {error} ({KEYS})") from error


def _refused(error: ValidationError, arguments: Mapping[str, object]) -> str:
    """Describe the values that vLLM refuses, each with its key if it is an argument."""
    messages = []
    for details in error.errors(include_url=False, include_input=False):
        names = [str(part) for part in details["loc"]]
        key = f"{ENGINE_KWARGS}.{names[0]}: " if names and names[0] in arguments else "".join(f"{n}: " for n in names)
        messages.append(f"{key}{details['msg']}")
    return f"vLLM refuses its arguments: {'; '.join(messages)} ({KEYS})"


def _divisor(tp_size: int) -> int:
    if dist.get_world_size() % tp_size:
        raise UserError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp_size} does not divide the "
            f"{dist.get_world_size()} processes of this job; choose a divisor"
        )
    return tp_size
