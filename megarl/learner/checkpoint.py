"""A learner's state on disk, by Megatron's distributed checkpointing: every rank writes and reads only its own shards.

The format does not know the split it was written with: a checkpoint may be read back under any other.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megarl.learner.learner import Learner
from megarl.learner.optimizer import torch_optimizers
from megarl.platform.cpu import megatron_platform

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
            learner.optimizer.megatron.load_state_dict(state["optimizer"])
            for optimizer in torch_optimizers(learner.optimizer.megatron):
                _separate_steps(optimizer)
            learner.optimizer.schedule.load_state_dict(state["schedule"])


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
        state["schedule"] = schedule.state_dict()
    return state
