"""The distributed optimizer on its way to and from a checkpoint, and the norm of its gradients."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace, replaced

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
LOADED_STATE = declare_megatron(
    f"{OPTIMIZER}:DistributedOptimizer",
    "_set_main_param_and_optimizer_states",
    reason="loading asks the checkpoint for AdamW's `step` tensors; the checkpoint has one step for all parameters",
    upstream="megatron/core/optimizer/distrib_optimizer.py: _set_main_param_and_optimizer_states",
    until="it keeps the states that a checkpoint lacks",
)
GATHERED_STATE = declare_megatron(
    f"{OPTIMIZER}:DistributedOptimizer",
    "get_parameter_state_dp_zero",
    reason="a save gathers the state while training waits, and a load makes no room for padding between buckets",
    upstream="megatron/core/optimizer/distrib_optimizer.py: get_parameter_state_dp_zero",
    until="Megatron-Core can gather a fully reshardable state asynchronously, and loads it with several buckets",
)
GARBAGE = declare_megatron(
    OPTIMIZER,
    "gc",
    reason="all garbage is collected after the gathering, while training waits",
    upstream="megatron/core/optimizer/distrib_optimizer.py: sharded_state_dict",
    until="the collection can be switched off",
)
CLIPPING = declare_megatron(
    "megatron.core.optimizer.clip_grads",
    "l2_norm_impl",
    "multi_tensor_scale_impl",
    reason="without Transformer Engine, the host computes a norm and waits for it, and makes a copy, for each gradient",
    upstream="megatron/core/utils.py: local_multi_tensor_l2_norm, local_multi_tensor_scale",
    until="they call torch's functions for lists of tensors",
)


def clip_gradients_at_once() -> None:
    """Compute the norm of all gradients, and scale them, with torch's functions for lists of tensors."""

    def l2_norm(
        chunk_size: int, overflow: object, lists: list[list[torch.Tensor]], per_tensor: bool
    ) -> tuple[torch.Tensor, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None

    def scale(chunk_size: int, overflow: object, lists: list[list[torch.Tensor]], factor: float) -> None:
        torch._foreach_mul_(lists[1], factor)  # Megatron scales in place: both lists are the same

    replace(CLIPPING, l2_norm_impl=l2_norm, multi_tensor_scale_impl=scale)


def load_state_of_torch_optimizers() -> None:
    """Keep the optimizer states that a checkpoint does not have.

    The one step of the checkpoint is set before. Transformer Engine and apex keep the step elsewhere and are not
    affected.
    """
    set_from = LOADED_STATE.original("_set_main_param_and_optimizer_states")

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        set_from(self, model_param, self._get_main_param_and_optimizer_states(model_param) | tensors)

    replace(LOADED_STATE, _set_main_param_and_optimizer_states=set_states)


@contextmanager
def gathered_later(states: Iterable[tuple[object, object]]) -> Iterator[None]:
    """Let each optimizer in `states` return the state paired with it instead of gathering its own.

    Megatron collects all garbage after the gathering. Nothing is gathered in the block, so the collection is left
    out.
    """
    with ExitStack() as frozen:
        frozen.enter_context(replaced(GARBAGE, gc=SimpleNamespace(collect=lambda: None)))
        for optimizer, state in states:
            frozen.enter_context(
                replaced(GATHERED_STATE, on=optimizer, get_parameter_state_dp_zero=partial(_return, state))
            )
        yield


def _return(state: object, **_: object) -> object:
    return state
