"""What `megarl.verify` looks at: a trainer and an engine with the same weights, and a third opinion.

The tokens that are compared are the engine's own greedy answers to fixed prompts (see `megarl.sync.selfcheck`), so they
are likely ones, about which wrong weights would be of another opinion.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Rollouts
from megarl.config.root import VerifyConfig
from megarl.distributed.exchange import together
from megarl.distributed.launch import Launch
from megarl.learner.batching import Budget
from megarl.learner.factory import make_learner
from megarl.learner.learner import Learner
from megarl.learner.parallel import build_mesh
from megarl.models.architecture import hf_shapes
from megarl.models.source import Source
from megarl.platform.device import device_type, local_device
from megarl.reshard.executor import Destination, Reshard, SyncReport
from megarl.reshard.files import CheckpointFiles, export
from megarl.reshard.headers import has_weights
from megarl.reshard.layout import Box, Piece, row_major, whole
from megarl.reshard.plan import RankPlan
from megarl.reshard.planner import lower_bound
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.start import start_engine
from megarl.sync.memory import MemoryMeter
from megarl.sync.plan import actor_end, engine_end, plan_sync
from megarl.sync.random_weights import write_random_weights
from megarl.sync.selfcheck import NUM_PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS, ask, fixed_prompts
from megarl.sync.transfer import send_weights

CHUNK = 1 << 22  # elements changed at once
FLOAT32_LIMIT = 1e-4  # between two log-probabilities of a float32 model
MOST_NAMED = 5  # tensors that a fault lists


@dataclass(frozen=True)
class Difference:
    """How far two sides are apart."""

    max_abs_logprob: float
    mean_prob: float

    def or_larger(self, other: "Difference") -> "Difference":
        """The larger numbers of both; what is not a number counts as the largest."""
        both = torch.tensor([astuple(self), astuple(other)], dtype=torch.float64)
        return Difference(*both.amax(0).tolist())


@dataclass(frozen=True)
class SyncCost:
    """What one sync moved and took, over all ranks."""

    bytes_received: list[int]
    seconds: float
    peak_extra_bytes: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that was found, and what of it is wrong."""

    differences: Mapping[str, Difference]  # by pair of sides, the larger of before and after the change
    changed_on_the_way: Sequence[str]  # tensors
    sync: SyncCost
    lower_bounds: Sequence[int]  # bytes, by rank
    is_float32: bool

    def faults(self, *, probability_limit: float) -> list[str]:
        """One sentence per thing that is not as it must be."""
        found = []
        for pair, difference in self.differences.items():
            if self.is_float32 and not difference.max_abs_logprob <= FLOAT32_LIMIT:  # not a number counts as too much
                found.append(f"{pair}: log-probabilities differ by {difference.max_abs_logprob:.2g} > {FLOAT32_LIMIT}")
            elif not difference.mean_prob <= probability_limit:
                found.append(
                    f"{pair}: probabilities differ by {difference.mean_prob:.2g} > {probability_limit} on average"
                )
        if self.changed_on_the_way:
            named = ", ".join(self.changed_on_the_way[:MOST_NAMED])
            found.append(f"{len(self.changed_on_the_way)} tensors changed between loading and export: {named} ...")
        for rank, (received, bound) in enumerate(zip(self.sync.bytes_received, self.lower_bounds, strict=True)):
            if received != bound:
                found.append(f"rank {rank} received {received} bytes and lacked {bound}")
        return found

    def report(self, *, probability_limit: float) -> dict[str, Any]:
        """Everything in plain types."""
        faults, received = self.faults(probability_limit=probability_limit), self.sync.bytes_received
        return {
            "ok": not faults,
            "faults": faults,
            "max_abs_logprob_diff": max(difference.max_abs_logprob for difference in self.differences.values()),
            "differences": {pair: asdict(difference) for pair, difference in self.differences.items()},
            "roundtrip_exact": not self.changed_on_the_way,
            "bytes_received_max": max(received),
            "bytes_received_mean": sum(received) / len(received),
            "bytes_lower_bound": max(self.lower_bounds),
            "peak_extra_bytes": self.sync.peak_extra_bytes,
            "seconds": self.sync.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Subject:
    """This rank's part of trainer and engine."""

    source: Source
    learner: Learner
    engine: RolloutEngine
    plan: RankPlan
    lower_bound: int  # bytes that this rank needs and does not hold
    launch: Launch

    @classmethod
    def build(cls, config: VerifyConfig, scratch: Path, launch: Launch) -> "Subject":
        """Start the engine, load the trainer, plan the sync. Collective; all ranks see `scratch`."""
        policy, megatron = config.actor_rollout_ref, config.actor_rollout_ref.actor.megatron
        source = source_or_random(Source.read(policy.model), scratch, dtype=getattr(torch, megatron.dtype))
        architecture = source.architecture
        engine = start_engine(
            source,
            policy.rollout,
            stop_token_ids=[],
            max_model_len=min(PROMPT_TOKENS + RESPONSE_TOKENS, architecture.max_position_embeddings),
            max_sequences=NUM_PROMPTS,
            trust_remote_code=policy.model.trust_remote_code,
        )
        device = local_device(device_type(config.trainer.device))
        mesh = build_mesh(megatron)
        learner = make_learner(source.directory, architecture, megatron, mesh, role="policy", device=device)
        held, needed = learner.layout(), engine.weights.layout()
        ends = (
            actor_end(architecture, megatron, num_ranks=launch.world_size),
            engine_end(architecture, policy.rollout, num_ranks=launch.world_size),
        )
        return cls(
            source=source,
            learner=learner,
            engine=engine,
            plan=plan_sync(architecture, megatron, policy.rollout, held=held, needed=needed, launch=launch),
            lower_bound=lower_bound(*ends, rank=launch.rank),
            launch=launch,
        )

    def sync_and_ask(self, *, check: bool) -> Rollouts:
        """Bring the trainer's weights to the engine and have every replica answer the fixed prompts."""
        vocab_size, max_model_len = self.source.architecture.vocab_size, self.engine.max_model_len
        prompts, num_tokens = fixed_prompts(vocab_size, max_model_len=max_model_len)

        def sync(destination: Destination) -> None:
            self._send(destination, check=check)

        with self.engine.awake(sync):
            return ask(self.engine, prompts, max_tokens=num_tokens)

    def measure(self) -> SyncCost:
        """Sync for the time, then for the memory, buckets included."""
        reports: list[SyncReport] = []
        meter = MemoryMeter(self.learner.device)

        def timed(destination: Destination) -> None:
            reshard = Reshard(self.plan, device=self.learner.device)
            dist.barrier()
            reports.append(self._send(destination, reshard=reshard))

        def weighed(destination: Destination) -> None:
            with meter.measured():
                self._send(destination)

        with self.engine.awake(timed):
            pass
        with meter.recording():
            for _ in range(2):
                with self.engine.awake(weighed):
                    pass
        found = together(lambda: (reports[0].bytes_received, reports[0].seconds, meter.peak_bytes))
        received, seconds, peak = zip(*found, strict=True)
        return SyncCost(list(received), max(seconds), max(peak))

    def _send(self, destination: Destination, *, reshard: Reshard | None = None, check: bool = False) -> SyncReport:
        reshard = reshard or Reshard(self.plan, device=self.learner.device)
        return send_weights(self.learner, destination, reshard, check=check)

    def compare(self, answers: Rollouts, exported: Path) -> dict[str, Difference]:
        """How far apart the sides are about the answers, pair by pair; `transformers` speaks on rank 0 alone."""
        budget = Budget(max_tokens=len(answers) * self.engine.max_model_len, max_sequences=None)
        assert answers.rollout_log_probs is not None, "`ask` asks for them"
        says = {"trainer": self.learner.infer(answers, budget).log_probs, "engine": answers.rollout_log_probs}
        if self.launch.rank == 0:
            says["transformers"] = transformers_log_probs(exported, answers, dtype=self.dtype)
        return {
            f"{one}-{other}": _difference(says[one], says[other], answers.mask) for one, other in combinations(says, 2)
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of the trainer's weights."""
        dtype: torch.dtype = self.learner.modules[0].config.params_dtype
        return dtype

    def export(self, directory: Path) -> None:
        """Write the trainer's weights as a Hugging Face checkpoint."""
        with self.learner.weights() as tensors:
            export(
                directory,
                hf_shapes(self.source.architecture),
                together(self.learner.layout),
                tensors,
                config=self.source.hf_config,
                dtype=self.dtype,
                ranks_per_node=self.launch.local_world_size,
                device=self.learner.device,
            )

    def changed_on_the_way(self, exported: Path) -> list[str]:
        """The tensors of an export that differ in a bit from those of the checkpoint (in the trainer's type)."""
        mine = list(hf_shapes(self.source.architecture).items())[self.launch.rank :: self.launch.world_size]
        ends = [CheckpointFiles(directory) for directory in (self.source.directory, exported)]

        def compare() -> list[str]:
            pairs = ((name, [_read(end, name, shape, self.dtype) for end in ends]) for name, shape in mine)
            return [name for name, (one, other) in pairs if not _same_bits(one, other)]

        return sorted(name for names in together(compare) for name in names)

    @torch.no_grad()
    def change_weights(self) -> None:
        """Change every weight of the trainer by a function of its value and of its place in the Hugging Face tensor."""
        shapes = hf_shapes(self.source.architecture)
        with self.learner.weights() as tensors:
            for piece in self.learner.layout():
                for part in _slabs(piece):
                    view = part.view(tensors[part.param])
                    place = _places(part.box, shapes[part.name]).to(view.device)
                    view.copy_(view.double() * (1.0 + 0.05 * place.sin()) + 0.001 * place.cos())


def look(subject: Subject, scratch: Path) -> Findings:
    """Compare, change every weight, compare again. Collective."""
    exported = scratch / "exported"
    subject.export(exported)
    changed_on_the_way = subject.changed_on_the_way(exported)
    loaded = subject.compare(subject.sync_and_ask(check=True), exported)
    subject.change_weights()
    subject.export(exported)
    changed = subject.compare(subject.sync_and_ask(check=False), exported)
    return Findings(
        differences={pair: loaded[pair].or_larger(changed[pair]) for pair in loaded},
        changed_on_the_way=changed_on_the_way,
        sync=subject.measure(),
        lower_bounds=together(lambda: subject.lower_bound),
        is_float32=subject.dtype == torch.float32,
    )


def source_or_random(source: Source, scratch: Path, *, dtype: torch.dtype) -> Source:
    """The source itself, or random weights in `scratch` where it has none. Collective."""
    if has_weights(source.directory):
        return source
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    directory = scratch / "random"

    def write() -> None:
        if dist.get_rank() == 0:
            directory.mkdir()
            write_random_weights(source.architecture, directory, dtype=dtype)
            (directory / "config.json").write_text(json.dumps({"architectures": [causal_lm], **source.hf_config}))

    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[source.architecture.family]  # without a name vLLM guesses
    together(write)
    return replace(source, directory=directory, overrides={})  # they are in its config.json


def transformers_log_probs(checkpoint: Path, answers: Rollouts, *, dtype: torch.dtype) -> Tensor:
    """[B, T] float32: what `transformers` says about the answers, computed on the host."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, trust_remote_code=False).eval()
    says = torch.zeros(answers.mask.shape)
    for sample in range(len(answers)):
        response = answers.response_ids(sample)
        tokens = torch.tensor([[*answers.prompt_of(sample).token_ids, *response]])
        with torch.no_grad():
            logits = model(tokens).logits[0, -len(response) - 1 : -1].float()
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        says[sample, : len(response)] = picked
    return says


def _difference(one: Tensor, other: Tensor, mask: Tensor) -> Difference:
    one, other = one[mask], other[mask]
    return Difference(float((one - other).abs().max()), float((one.exp() - other.exp()).abs().mean()))


def _read(files: CheckpointFiles, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    files.load([Piece(name, whole(shape), name, 0, row_major(shape), dtype)], {name: tensor}, shapes={name: shape})
    return tensor


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _slabs(piece: Piece) -> Iterator[Piece]:
    """The piece in parts of so many elements at most, cut along its first dimension."""
    lo, hi = piece.box.lo, piece.box.hi
    rows = max(1, CHUNK // (piece.box.numel // (hi[0] - lo[0])))
    for first in range(lo[0], hi[0], rows):
        yield piece.part(Box((first, *lo[1:]), (min(first + rows, hi[0]), *hi[1:])))


def _places(box: Box, shape: tuple[int, ...]) -> Tensor:
    """The number of each of the box's elements in the full tensor, float64."""
    number = torch.zeros((), dtype=torch.float64)
    for low, high, step in zip(box.lo, box.hi, row_major(shape), strict=True):
        number = number[..., None] + torch.arange(low, high, dtype=torch.float64) * step
    return number
