"""The measurements of `megarl verify`: a trainer and an engine with the same weights, and `transformers` as a third.

They compare probabilities of the engine's greedy responses to fixed prompts (see `megarl.weight_sync.selfcheck`). Such
tokens are likely, so wrong weights give them other probabilities.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.batch import Rollouts
from megarl.config.root import VerifyConfig
from megarl.distributed.exchange import on_first_rank, together, wait_for_all
from megarl.distributed.launch import Launch
from megarl.learner.batching import Budget
from megarl.learner.factory import make_learner
from megarl.learner.layout import weights
from megarl.learner.learner import Learner
from megarl.learner.lora import adapter_layout, adapter_weights
from megarl.learner.parallel import build_mesh
from megarl.models.architecture import hf_shapes
from megarl.models.lora import adapter_shapes
from megarl.models.source import Source
from megarl.reshard.executor import Destination, Reshard, SyncReport
from megarl.reshard.files import CheckpointFiles, export
from megarl.reshard.headers import Shape, has_weights
from megarl.reshard.layout import Box, Piece, row_major
from megarl.reshard.plan import RankPlan
from megarl.reshard.planner import lower_bound
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.limits import Limits
from megarl.rollout.start import start_engine
from megarl.weight_sync.memory import MemoryMeter
from megarl.weight_sync.plan import actor_placement, plan_sync, sampler_placement
from megarl.weight_sync.random_weights import write_random_weights
from megarl.weight_sync.reference import reference_log_probs, reference_process
from megarl.weight_sync.selfcheck import (
    NUM_PROMPTS,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    fixed_prompts,
    generate_on_replicas,
    log_probs_of_all,
)
from megarl.weight_sync.transfer import send_weights

CHUNK = 1 << 22  # elements changed at once
FLOAT32_LIMIT = 1e-4  # between two log-probabilities of a float32 model
MOST_NAMED = 5  # tensors that a fault lists


@dataclass(frozen=True)
class Deviation:
    """The difference between two of the three implementations."""

    max_abs_logprob: float
    mean_prob: float

    def or_larger(self, other: "Deviation") -> "Deviation":
        """Return the larger number of both in each field. NaN counts as the largest."""
        both = torch.tensor([astuple(self), astuple(other)], dtype=torch.float64)
        return Deviation(*both.amax(0).tolist())


@dataclass(frozen=True)
class SyncCost:
    """The traffic, time and memory of one sync, over all ranks."""

    bytes_received: list[int]
    seconds: float
    peak_extra_bytes: int


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """All measurements, and the faults among them."""

    differences: Mapping[str, Deviation]  # by pair, the larger of before and after the change
    roundtrip_mismatches: Sequence[str]  # names of tensors
    sync: SyncCost
    lower_bounds: Sequence[int]  # bytes, by rank
    is_float32: bool

    def faults(self, *, probability_limit: float) -> list[str]:
        """Return a sentence for each fault."""
        found = []
        for pair, difference in self.differences.items():
            if self.is_float32 and not difference.max_abs_logprob <= FLOAT32_LIMIT:  # NaN counts as too much
                found.append(f"{pair}: log-probabilities differ by {difference.max_abs_logprob:.2g} > {FLOAT32_LIMIT}")
            elif not difference.mean_prob <= probability_limit:
                found.append(
                    f"{pair}: probabilities differ by {difference.mean_prob:.2g} > {probability_limit} on average"
                )
        if self.roundtrip_mismatches:
            named = ", ".join(self.roundtrip_mismatches[:MOST_NAMED])
            found.append(f"{len(self.roundtrip_mismatches)} tensors changed between loading and export: {named} ...")
        for rank, (received, bound) in enumerate(zip(self.sync.bytes_received, self.lower_bounds, strict=True)):
            if received != bound:
                found.append(f"rank {rank} received {received} bytes, but lacked {bound}")
        return found

    def report(self, *, probability_limit: float) -> dict[str, Any]:
        """Return everything in plain types."""
        faults = self.faults(probability_limit=probability_limit)
        received = self.sync.bytes_received
        return {
            "ok": not faults,
            "faults": faults,
            "max_abs_logprob_diff": max(difference.max_abs_logprob for difference in self.differences.values()),
            "differences": {pair: asdict(difference) for pair, difference in self.differences.items()},
            "roundtrip_exact": not self.roundtrip_mismatches,
            "bytes_received_max": max(received),
            "bytes_received_mean": sum(received) / len(received),
            "bytes_lower_bound": max(self.lower_bounds),
            "peak_extra_bytes": self.sync.peak_extra_bytes,
            "seconds": self.sync.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class VerifySetup:
    """This rank's part of the trainer and the engine to verify."""

    source: Source
    learner: Learner
    engine: RolloutEngine
    plan: RankPlan
    lower_bound: int  # bytes that this rank needs and does not hold
    launch: Launch

    @classmethod
    def build(cls, config: VerifyConfig, scratch: Path, launch: Launch) -> "VerifySetup":
        """Start the engine, load the trainer and plan the sync. Collective. All ranks see `scratch`."""
        policy = config.actor_rollout_ref
        megatron = config.actor_rollout_ref.actor.megatron
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
        mesh = build_mesh(megatron)
        learner = make_learner(source.directory, architecture, megatron, mesh, role="policy", lora=source.lora)
        held = learner.layout()
        needed = engine.weights.layout()
        placements = (
            actor_placement(architecture, megatron, num_ranks=launch.world_size),
            sampler_placement(architecture, policy.rollout, num_ranks=launch.world_size),
        )
        return cls(
            source=source,
            learner=learner,
            engine=engine,
            plan=plan_sync(architecture, megatron, policy.rollout, held=held, needed=needed, launch=launch),
            lower_bound=lower_bound(*placements, rank=launch.rank),
            launch=launch,
        )

    def sync_and_ask(self, *, check: bool) -> Rollouts:
        """Sync the trainer's weights to the engine, and generate every replica's responses to the fixed prompts."""
        vocab_size = self.source.architecture.vocab_size
        max_model_len = self.engine.max_model_len
        prompts, num_tokens = fixed_prompts(vocab_size, max_model_len=max_model_len)
        with self.engine.receive_weights() as destination:
            self._send(destination, check=check)
        with self.engine.generating():
            return generate_on_replicas(self.engine, prompts, max_tokens=num_tokens)

    def measure(self) -> SyncCost:
        """Measure the time of one sync, and the memory of another, buckets included."""
        meter = MemoryMeter(self.learner.device)
        with self.engine.receive_weights() as destination:
            reshard = Reshard(self.plan, device=self.learner.device)
            wait_for_all()
            report = self._send(destination, reshard=reshard)
        with self.engine.generating():
            pass
        with meter.recording():
            for _ in range(2):
                with self.engine.receive_weights() as destination, meter.measured():
                    self._send(destination)
                with self.engine.generating():
                    pass
        found = together(lambda: (report.bytes_received, report.seconds, meter.peak_bytes))
        received, seconds, peak = zip(*found, strict=True)
        return SyncCost(list(received), max(seconds), max(peak))

    def _send(self, destination: Destination, *, reshard: Reshard | None = None, check: bool = False) -> SyncReport:
        reshard = reshard or Reshard(self.plan, device=self.learner.device)
        return send_weights(self.learner, destination, reshard, check=check)

    def compare(self, responses: Rollouts, exported: Path, reference: Executor | None) -> dict[str, Deviation]:
        """Compare the probabilities of the responses, pair by pair. Only rank 0 runs `transformers`."""
        budget = Budget(max_tokens=len(responses) * self.engine.max_model_len, max_sequences=None)
        assert responses.rollout_log_probs is not None, "`generate_on_replicas` requests them"
        trainer = log_probs_of_all(self.learner, responses, budget)
        log_probs = {"trainer": trainer, "engine": responses.rollout_log_probs}
        if reference:
            log_probs["transformers"] = reference_log_probs(reference, exported, responses, dtype=self.dtype)
        return {
            f"{one}-{other}": _difference(log_probs[one], log_probs[other], responses.mask)
            for one, other in combinations(log_probs, 2)
        }

    @property
    def dtype(self) -> torch.dtype:
        """The type of the trainer's weights."""
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
                config=self.source.config_in(str(self.dtype).removeprefix("torch.")),
                dtype=self.dtype,
                ranks_per_node=self.launch.local_world_size,
                device=self.learner.device,
            )

    def roundtrip_mismatches(self, exported: Path) -> list[str]:
        """Return the tensors of an export that differ in any bit from the checkpoint's, in the trainer's type."""
        mine = list(hf_shapes(self.source.architecture).items())[self.launch.rank :: self.launch.world_size]
        ends = [CheckpointFiles(directory) for directory in (self.source.directory, exported)]

        def compare() -> list[str]:
            differing = list[str]()
            for name, shape in mine:
                one, other = (_read(end, name, shape, self.dtype) for end in ends)
                if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                    differing.append(name)
            return differing

        return sorted(name for names in together(compare) for name in names)

    @torch.no_grad()
    def change_weights(self) -> None:
        """Change every weight of the trainer by a function of its value and of its place in the Hugging Face tensor.

        A trainer with adapters changes these alone.
        """
        learner = self.learner
        with learner.offload.parameters():
            shapes: Mapping[str, Shape]
            if learner.lora:
                shapes = adapter_shapes(learner.architecture, learner.lora)
                layout = adapter_layout(learner.modules)
                tensors = adapter_weights(learner.modules)
                shift = 0.05
            else:
                shapes = hf_shapes(learner.architecture)
                layout = learner.layout()
                tensors = weights(learner.modules)
                shift = 0.001
            for piece in layout:
                for part in _slabs(piece):
                    view = part.view(tensors[part.param])
                    place = _places(part.box, shapes[part.name]).to(view.device)
                    view.copy_(view.double() * (1.0 + 0.05 * place.sin()) + shift * place.cos())


def run_checks(setup: VerifySetup, scratch: Path) -> VerifyReport:
    """Compare, change every weight, compare again. Collective."""
    exported = scratch / "exported"
    setup.export(exported)
    roundtrip_mismatches = setup.roundtrip_mismatches(exported)
    with reference_process() if setup.launch.rank == 0 else nullcontext() as reference:
        loaded = setup.compare(setup.sync_and_ask(check=True), exported, reference)
        setup.change_weights()
        setup.export(exported)
        changed = setup.compare(setup.sync_and_ask(check=False), exported, reference)
    return VerifyReport(
        differences={pair: loaded[pair].or_larger(changed[pair]) for pair in loaded},
        roundtrip_mismatches=roundtrip_mismatches,
        sync=setup.measure(),
        lower_bounds=together(lambda: setup.lower_bound),
        is_float32=setup.dtype == torch.float32,
    )


def probability_limit(config: VerifyConfig) -> float:
    """Return the highest mean difference between probabilities that passes."""
    policy = config.actor_rollout_ref
    return Limits.of(policy.rollout.sync, policy.rollout.dtype, policy.actor.megatron.dtype).probs_stop


def source_or_random(source: Source, scratch: Path, *, dtype: torch.dtype) -> Source:
    """Return the source itself, or a source of random weights in `scratch` if it has no weights. Collective."""
    if has_weights(source.directory):
        return source
    directory = scratch / "random"
    on_first_rank(lambda: _write_random_model(source, directory, dtype))
    return replace(source, directory=directory, overrides={})  # config.json contains the overrides


def _write_random_model(source: Source, directory: Path, dtype: torch.dtype) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    directory.mkdir()
    write_random_weights(source.architecture, directory, dtype=dtype)
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[source.architecture.family]  # without this name vLLM guesses
    config = {"architectures": [causal_lm], **source.hf_config}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _difference(one: Tensor, other: Tensor, mask: Tensor) -> Deviation:
    one = one[mask]
    other = other[mask]
    return Deviation(float((one - other).abs().max()), float((one.exp() - other.exp()).abs().mean()))


def _read(files: CheckpointFiles, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    files.load([Piece.complete(name, shape, dtype)], {name: tensor}, shapes={name: shape})
    return tensor


def _slabs(piece: Piece) -> Iterator[Piece]:
    """Cut the piece along its first dimension into parts of at most `CHUNK` elements."""
    lo = piece.box.lo
    hi = piece.box.hi
    rows = max(1, CHUNK // (piece.box.numel // (hi[0] - lo[0])))
    for first in range(lo[0], hi[0], rows):
        yield piece.part(Box((first, *lo[1:]), (min(first + rows, hi[0]), *hi[1:])))


def _places(box: Box, shape: Shape) -> Tensor:
    """Return the number of each element of the box in the full tensor, float64."""
    number = torch.zeros((), dtype=torch.float64)
    for low, high, step in zip(box.lo, box.hi, row_major(shape), strict=True):
        number = number[..., None] + torch.arange(low, high, dtype=torch.float64) * step
    return number
