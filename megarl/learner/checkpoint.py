"""A learner's state on disk, by Megatron's distributed checkpointing: every rank writes and reads only its own shards.

The format does not know the split it was written with: a checkpoint may be read back under any other. What the
configuration says of the optimizer is not part of a checkpoint either, so a run may go on with another learning rate or
for more steps.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megarl.learner.learner import Learner
from megarl.learner.optimizer import Optimizer, torch_optimizers
from megarl.platform.cpu import megatron_platform

CONFIGURED = ("max_lr", "min_lr", "betas")
FORMAT = MappingProxyType({"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False})


def save_learner(learner: Learner, directory: Path) -> None:
    """Write weights, optimizer and schedule to `directory`, which must exist and be empty. Collective."""
    with learner.offload.everything(), megatron_platform():
        state = _sharded_state(learner, is_loading=False)
        dist_checkpointing.save(state, str(directory), content_metadata=dict(FORMAT))


def load_learner(learner: Learner, directory: Path) -> None:
    """Read what `save_learner` wrote, under whatever split. Collective."""
    with learner.offload.everything(), megatron_platform():
        state = dist_checkpointing.load(_sharded_state(learner, is_loading=True), str(directory))
        learner.module.load_state_dict(state["model"])
        if learner.optimizer:
            _load_optimizer(learner.optimizer, state["optimizer"], num_steps=state["schedule"]["num_steps"])


def _load_optimizer(optimizer: Optimizer, state: Any, *, num_steps: int) -> None:
    """Take over the moments and the place in the schedule; rates and decay stay as configured."""
    groups = optimizer.megatron.param_groups
    configured = [{key: group[key] for key in CONFIGURED if key in group} for group in groups]
    for saved, values in zip(state.get("optimizer", state)["param_groups"], configured, strict=True):
        saved.update(values)  # megatron-core 0.19 recognises a group by these, and ours may have changed since
    optimizer.megatron.load_state_dict(state)
    for inner in torch_optimizers(optimizer.megatron):
        _separate_steps(inner)
    for group, values in zip(optimizer.megatron.param_groups, configured, strict=True):
        group.update(values)
    optimizer.schedule.num_steps = num_steps
    optimizer.schedule.step(0)


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Megatron hands one tensor as the step of all parameters, and AdamW would count it up once for each of them."""
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.clone()


def _sharded_state(learner: Learner, *, is_loading: bool) -> dict[str, Any]:
    """The learner's state as Megatron's shards; without an optimizer, the weights alone."""
    metadata = dict(FORMAT)  # Megatron adds process groups of its own
    model = learner.module.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model}
    if learner.optimizer:
        optimizer, schedule = learner.optimizer.megatron, learner.optimizer.schedule
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        state["schedule"] = {"num_steps": schedule.num_steps}
    return state
