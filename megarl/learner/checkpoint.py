"""A learner's state on disk, by Megatron's distributed checkpointing: every rank writes and reads only its own shards.

The format is independent of the split: a checkpoint may be loaded under any other split. A checkpoint does not hold the
optimizer's configuration, so a run may resume with another learning rate or for more steps.
"""

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megarl.distributed.exchange import largest
from megarl.learner.learner import Learner
from megarl.learner.lora import trained_shards
from megarl.learner.objects import first_words, read_objects
from megarl.learner.optimizer import Optimizer, torch_optimizers
from megarl.learner.patches.cpu import megatron_platform
from megarl.learner.patches.optimizer import gathered_later
from megarl.learner.patches.reading import load_index, reading_data_only
from megarl.learner.patches.writing import first_rank_failing_with_all
from megarl.learner.staging import OptimizerCopy, Staging, copy_optimizer, copy_shards, keep_written, room_for_optimizer
from megarl.models.architecture import hf_shapes
from megarl.models.lora import adapter_shapes
from megarl.platform.device import local_device
from megarl.platform.small_files import Damage, read_bytes, read_json

MAX_INDEX_BYTES = 4 << 30
OF_FILES = (OSError, EOFError, ValueError, LookupError, pickle.UnpicklingError)  # torch raises these when it reads
CONFIGURED = ("max_lr", "min_lr", "betas", "fused")
IDLE = "idle"
EXTRA_STATE = "._extra_state"
FORMAT = MappingProxyType({"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False})
# By default, megatron-core 0.19 writes with nvidia-resiliency-ext.
WRITER = {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A learner's state on its way to a directory."""

    copies: Sequence[OptimizerCopy]
    request: Any  # the `AsyncRequest` of Megatron, which writes the state

    def write(self) -> None:
        """Complete the copies, and write this rank's state from them; may run in any thread."""
        write_all([self])

    def finish(self) -> None:
        """Complete the checkpoint after all ranks have written. Collective."""
        with megatron_platform(), first_rank_failing_with_all():
            for finalize in self.request.finalize_fns:
                finalize()


def write_all(writings: Sequence[Writing]) -> None:
    """Write the state of several learners. All messages come before a file can fail on one rank alone."""
    for writing in writings:
        for copy in writing.copies:
            copy.gather()
    for writing in writings:
        writing.request.async_fn()


def save_learner(learner: Learner, directory: Path, staging: Staging) -> Writing:
    """Copy weights, optimizer and schedule, to be written to `directory`, which must exist and be empty. Collective.

    The learner may continue at once. Nothing else may be saved through `staging` until the writing is finished.
    """
    with learner.offload.parameters(), megatron_platform():
        torch.cuda.synchronize()  # an optimizer that rests on the host is copied there, and may be on its way
        parts = _distributed_parts(learner.optimizer)
        copies = [
            copy_optimizer(part, staging, f"{directory.name}.optimizer.{number}") for number, part in enumerate(parts)
        ]
        with gathered_later((part, copy.state) for part, copy in zip(parts, copies, strict=True)):
            state = _sharded_state(learner, is_loading=False)
        sharded = [part for part in _optimizer_parts(state.get("optimizer", {})) if "param_state" in part]
        for part, copy in zip(sharded, copies, strict=True):
            keep_written(part, copy)
        is_first = not staging.knows(directory.name)
        copy_shards(state, staging, directory.name)
        with first_rank_failing_with_all():
            request = dist_checkpointing.save(
                state,
                str(directory),
                validate_access_integrity=is_first,  # D415
                content_metadata=dict(FORMAT),
                async_sharded_save=True,
                **WRITER,
            )
        torch.cuda.synchronize()
    return Writing(copies=copies, request=request)


def load_learner(learner: Learner, directory: Path) -> None:
    """Load a checkpoint of `save_learner`, under any split; a checkpoint that names code is refused. Collective.

    Raises:
        Damage: a file cannot be read, or is not data.
    """
    with learner.offload.everything(), megatron_platform(), reading_data_only(), _naming(directory):
        parts = _distributed_parts(learner.optimizer)
        with gathered_later((part, room_for_optimizer(part)) for part in parts):
            room = _sharded_state(learner, is_loading=True)
        state = dist_checkpointing.load(room, str(directory))
        chunks = state.get("model", {})  # without those that have nothing to load
        for number, module in enumerate(learner.modules):
            _load_weights(module, chunks.get(number, {}))
        if learner.optimizer:
            _load_optimizer(learner.optimizer, state["optimizer"], num_steps=state["schedule"]["num_steps"])


def saved_shapes(learner: Learner) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the parameters that `save_learner` writes, by name in Hugging Face's or PEFT's files."""
    architecture = learner.architecture
    return adapter_shapes(architecture, learner.lora) if learner.lora else hf_shapes(architecture)


def check_files(directory: Path) -> None:
    """Check the files that `save_learner` wrote, without reading the shards. Raises Damage, which names a file."""
    read_json(directory / CONFIG_FNAME, dict[str, object])
    common = directory / COMMON_STATE_FNAME
    if os.path.lexists(common):  # written by megatron-core 0.16.1
        read_objects(common)
    index = directory / ".metadata"
    content = io.BytesIO(read_bytes(index, max_bytes=MAX_INDEX_BYTES))
    try:
        places = load_index(content).storage_data.values()
    except Exception as error:  # a damaged pickle may raise anything
        raise Damage.in_content(index, first_words(error)) from error
    for name in {place.relative_path for place in places}:
        if not os.path.isfile(directory / name):  # noqa: PTH113 - raises nothing
            raise Damage(directory / name, f"is missing, and {index} names it")


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Convert errors of reading, which torch raises for all ranks together, to Damage of `directory`."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        failures = [failure for failure, _ in getattr(error, "failures", {}).values()] or [error]
        cause = next((failure for failure in failures if _is_of_file(failure)), None)
        if cause is None:
            raise
        raise Damage.in_content(directory, first_words(cause)) from error


def _is_of_file(error: BaseException) -> bool:
    message = str(error)
    return isinstance(error, OF_FILES) or message.startswith("PytorchStreamReader") or "metadata read failed" in message


def _load_optimizer(optimizer: Optimizer, state: dict[Any, Any], *, num_steps: int) -> None:
    """Load the moments and the position in the schedule; rates and weight decay stay as configured."""
    groups = optimizer.megatron.param_groups
    configured = [{key: group[key] for key in CONFIGURED if key in group} for group in groups]
    restored = [group for part in _optimizer_parts(state) for group in part.get("optimizer", part)["param_groups"]]
    for saved, values in zip(restored, configured, strict=True):
        saved.update(values)  # megatron-core 0.19 identifies a group by these values, not by the saved ones
    optimizer.megatron.load_state_dict(state)
    for inner in torch_optimizers(optimizer.megatron):
        _separate_steps(inner)
    for group, values in zip(optimizer.megatron.param_groups, configured, strict=True):
        group.update(values)
    optimizer.schedule.num_steps = num_steps
    optimizer.schedule.step(0)


def _optimizer_parts(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the saved state of each of Megatron's chained optimizers: experts have an optimizer of their own."""
    return [state[number] for number in sorted(state)] if 0 in state else [state]


def _distributed_parts(optimizer: Optimizer | None) -> list[DistributedOptimizer]:
    parts = getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron]) if optimizer else []
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def _count_for_idle_parts(optimizer: Optimizer) -> None:
    """Give an optimizer without parameters on this rank its step: Megatron reads the step of any state. Collective.

    A rank may have no experts, or no adapters in its stage, so nothing learns there. Other ranks know the step then. It
    is kept as the state of no parameter.
    """
    states = [part.optimizer.state for part in _distributed_parts(optimizer)]
    steps = [value["step"] for state in states for key, value in state.items() if key != IDLE and "step" in value]
    num_steps = largest(int(steps[0]) if steps else -1)
    for state in states:
        if num_steps >= 0 and set(state) <= {IDLE}:
            state[IDLE] = {"step": torch.full((), float(num_steps), device=local_device())}


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its own step: AdamW would increment Megatron's shared tensor once for each parameter."""
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = step.clone()


def _without_extras(shards: ShardedStateDict) -> ShardedStateDict:
    """Leave out what Transformer Engine's modules keep for 8-bit training, which megarl does not do.

    A learner without Transformer Engine has no such objects, and could not exchange checkpoints with one that has.
    """
    return {name: shard for name, shard in shards.items() if EXTRA_STATE not in name}


def _load_weights(module: torch.nn.Module, shards: ShardedStateDict) -> None:
    """Load the weights of a chunk, which has no other state, or only those that are not frozen."""
    lost = {name for names in module.load_state_dict(shards, strict=False) for name in names}
    lost -= {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert all(EXTRA_STATE in name for name in lost), f"Megatron asked for other weights than it has: {lost}"


def _sharded_state(learner: Learner, *, is_loading: bool) -> ShardedStateDict:
    """Return the learner's state as Megatron's shards; without an optimizer, only the weights."""
    metadata = dict(FORMAT)  # a copy, because Megatron adds process groups
    if learner.lora:
        model = [trained_shards(module) for module in learner.modules]
    else:
        model = [_without_extras(module.sharded_state_dict(metadata=metadata)) for module in learner.modules]
    state: ShardedStateDict = {"model": dict(enumerate(model))}
    if learner.optimizer:
        optimizer = learner.optimizer.megatron
        schedule = learner.optimizer.schedule
        _count_for_idle_parts(learner.optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        state["schedule"] = {"num_steps": schedule.num_steps}
    return state
