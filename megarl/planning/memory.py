"""The device memory of the fullest rank at each moment of a step.

At every moment the models that are not at work are parked: they have on the device what their offload flags leave
there. Nothing here knows a process or a tensor: it is arithmetic on the configuration and the shapes of the parameters.
Not counted: what the CUDA context, the communication libraries and the allocator's fragmentation take.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, get_args

import torch

from megarl.models.architecture import Architecture
from megarl.models.engine import engine_placement
from megarl.models.grid import Grid
from megarl.models.trainer import parameter_shapes
from megarl.planning.activations import PhaseWork, inference_bytes, training_bytes
from megarl.planning.adapter_dropout import dropout_bytes
from megarl.planning.engine import EngineMemory, engine_memory
from megarl.planning.states import (
    DTYPE_BYTES,
    States,
    adapted_states,
    copied_bytes,
    frozen_states,
    held_bytes,
    trained_states,
)
from megarl.planning.workload import REWARD_MODEL, TrainerModel, Workload

Phase = Literal["sync", "generate", "infer", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)
BUCKETS = 4  # of `reshard/executor.py`: two to send and two to receive


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The device memory of a rank while the engine or one model works."""

    phase: Phase
    worker: str  # the model or engine at work
    parts: Mapping[str, int]  # bytes by name

    @property
    def total(self) -> int:
        """Return all bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The moments of one rank."""

    rank: int
    stage: int
    states: Mapping[str, States]  # by model, with nothing offloaded
    engine: EngineMemory
    moments: tuple[Moment, ...]
    host_copies: int  # bytes of host memory that asynchronous saves keep; 0: saves are not asynchronous

    @cached_property
    def fullest(self) -> dict[Phase, Moment]:
        """Return the fullest moment of each phase."""
        fullest: dict[Phase, Moment] = {}
        for phase in PHASES:
            moments = [moment for moment in self.moments if moment.phase == phase]
            fullest[phase] = max(moments, key=lambda moment: moment.total)
        return fullest

    @property
    def peak(self) -> int:
        """Return the bytes at the fullest of all moments."""
        return max(moment.total for moment in self.moments)


def fullest_rank(workload: Workload, *, device_bytes: int, bucket_bytes: int) -> RankMemory:
    """Return the memory of the rank with the fullest moment. The ranks of a stage are alike; the stages differ.

    Of several such ranks, it is the one that is fuller in all phases together.
    `bucket_bytes` is the size of one of the sync's buckets.
    """
    engine = engine_memory(
        workload.policy,
        workload.config.actor_rollout_ref.rollout,
        weights=engine_weights(workload),
        device_bytes=device_bytes,
    )
    memories = [rank_memory(workload, stage, engine, bucket_bytes=bucket_bytes) for stage in range(workload.grid.pp)]

    def fullness(memory: RankMemory) -> tuple[int, int]:
        return memory.peak, sum(moment.total for moment in memory.fullest.values())

    return max(memories, key=fullness)


def rank_memory(workload: Workload, stage: int, engine: EngineMemory, *, bucket_bytes: int) -> RankMemory:
    """Return the memory of the first rank of a pipeline stage."""
    rank = stage * (workload.grid.num_ranks // workload.grid.pp)
    states = {model.name: model_states(workload.grid, model, rank) for model in workload.models}
    moments = tuple(_moments(workload, stage, states, engine, bucket_bytes=bucket_bytes))
    host_copies = 0
    if workload.config.trainer.async_save:
        for model in workload.models:
            if model.updates:
                learning = model.learning_shapes(workload.grid, rank)
                host_copies += copied_bytes(learning, model.section, workload.grid)
    return RankMemory(rank=rank, stage=stage, states=states, engine=engine, moments=moments, host_copies=host_copies)


def model_states(grid: Grid, model: TrainerModel, rank: int) -> States:
    """Return weights, gradients and optimizer of a model on a rank, with nothing offloaded."""
    if model.is_start:
        return States(weights=0)
    if model.updates is None:
        return frozen_states(parameter_shapes(model.architecture, grid, rank), model.section)
    learning = model.learning_shapes(grid, rank)
    if model.lora is None:
        return trained_states(learning, model.section, grid)
    return adapted_states(model.frozen_shapes(grid, rank), learning, model.section, grid)


def optimizer_on_all_ranks(workload: Workload, model: TrainerModel) -> int:
    """Return the bytes of a model's gradients and optimizer state over all ranks; those of a stage are alike."""
    ranks_per_stage = workload.grid.num_ranks // workload.grid.pp
    states = (model_states(workload.grid, model, stage * ranks_per_stage) for stage in range(workload.grid.pp))
    return ranks_per_stage * sum(one.gradients + one.optimizer for one in states)


def engine_weights(workload: Workload) -> int:
    """Return the bytes of the weights on the fullest rank of an engine, without the padding of the vocabulary."""
    section = workload.config.actor_rollout_ref.rollout
    return _engine_weights(
        workload.policy,
        section.tensor_model_parallel_size,
        expert_parallel=section.has_whole_experts,
        dtype=getattr(torch, section.dtype),
    )


@cache
def _engine_weights(architecture: Architecture, tp_size: int, *, expert_parallel: bool, dtype: torch.dtype) -> int:
    placement = engine_placement(
        architecture, num_ranks=tp_size, tp_size=tp_size, expert_parallel=expert_parallel, dtype=dtype
    )
    return int(held_bytes(placement, tp_size).max())


def _moments(
    workload: Workload, stage: int, states: Mapping[str, States], engine: EngineMemory, *, bucket_bytes: int
) -> Iterator[Moment]:
    parked = {"routes of the KV cache": engine.routes} if engine.routes else {}
    for model in workload.models:
        parked |= _parked(model, states[model.name])
    weights = {"engine weights": engine.weights}
    cache = {"engine activations": engine.activations, "KV cache": engine.kv_cache}
    if engine.memories:
        cache["memories of linear attention"] = engine.memories
    actor = {"actor weights": states["actor"].weights}
    sending = {"sync buckets": BUCKETS * bucket_bytes}
    rank = stage * (workload.grid.num_ranks // workload.grid.pp)
    if workload.models[0].lora:
        sending["merged weight"] = workload.models[0].merging_bytes(workload.grid, rank)
    yield Moment(phase="sync", worker="engine", parts=parked | actor | weights | sending)
    yield Moment(phase="generate", worker="engine", parts=parked | weights | cache)
    if not workload.config.actor_rollout_ref.rollout.free_cache_engine:
        parked |= weights | cache
    for model in workload.models:
        present = states[model.name]
        activations = f"{model.name} activations"
        own = present.weights if model.section.param_offload else own_weights(model, present)
        here = parked | (actor if model.is_start else {f"{model.name} weights": own})
        if model.name == REWARD_MODEL and workload.config.algorithm.filter_groups.enable:
            here |= weights | cache  # dynamic sampling has samples scored before it draws more
        size = inference_bytes(model.architecture, model.section, workload.grid, stage=stage, work=model.infers)
        kept = _kept_of_references(workload, stage, model.infers, here)
        yield Moment(phase="infer", worker=model.name, parts=here | kept | {activations: size})
        if model.updates:
            here |= {f"{model.name} gradients": present.gradients, f"{model.name} optimizer": present.optimizer}
            if model.updates.exact_kl:
                for reference in workload.references:
                    yield _reading(workload, reference, stage, states[reference.name], model.updates, here)
            size = training_bytes(model.architecture, model.section, workload.grid, stage=stage, work=model.updates)
            if model.lora:
                size += dropout_bytes(model, workload.grid, stage=stage, rank=rank)
            kept = _kept_of_references(workload, stage, model.updates, here)
            yield Moment(phase="update", worker=model.name, parts=here | kept | {activations: size})


def _reading(
    workload: Workload, reference: TrainerModel, stage: int, states: States, work: PhaseWork, here: Mapping[str, int]
) -> Moment:
    """Return the moment in which a reference reads a mini-batch of an update; its hidden states go to host memory."""
    name = reference.name
    section = reference.section
    work = replace(work, role="value")  # like a value model it computes no logits
    size = inference_bytes(reference.architecture, section, workload.grid, stage=stage, work=work)
    weights = {} if reference.is_start else {f"{name} weights": states.weights}
    parts = {**here, **weights, f"{name} activations": size}
    return Moment(phase="update", worker=name, parts=parts)


def _kept_of_references(workload: Workload, stage: int, work: PhaseWork, here: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the references that the head of the exact divergence keeps: slices of the vocabulary."""
    if not work.exact_kl or stage != workload.grid.pp - 1:
        return {}
    kept = {}
    for reference in workload.references:
        if reference.is_start:
            continue
        a = reference.architecture
        name = f"{reference.name} weights"
        rows = -(-a.vocab_size // workload.grid.tp)
        kept[name] = max(here[name], rows * a.hidden_size * DTYPE_BYTES[reference.section.dtype])
    return kept


def _parked(model: TrainerModel, states: States) -> dict[str, int]:
    """Return the bytes that stay on the device while a model does not work."""
    if model.is_start:
        return {}
    section = model.section
    present = {"weights": 0 if section.param_offload else own_weights(model, states)}
    if model.updates:
        present["gradients"] = 0 if section.grad_offload else states.gradients
        present["optimizer"] = 0 if section.optimizer_offload else states.optimizer
    return {f"{model.name} {part}": num_bytes for part, num_bytes in present.items()}


def own_weights(model: TrainerModel, states: States) -> int:
    """Return the bytes of weights that a model has for itself, on the device or on the host."""
    return states.weights - states.frozen if model.shares_base else states.weights
