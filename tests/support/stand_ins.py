"""Stand-ins on the CPU for what only a machine with CUDA has, so that its consequences can be tested without one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

META = torch.device("meta")


@contextmanager
def cuda_on_meta() -> Iterator[None]:
    """Work on CUDA within the block, without Transformer Engine: what anyone asks of CUDA is on the meta device.

    A tensor that nobody brings to CUDA stays on the host, as it would there.
    """
    from megarl.learner import factory, model, parallel
    from megarl.learner.patches import cpu

    with ExitStack() as stack:
        for module in (model, parallel):
            stack.enter_context(patch.object(module, "megatron_platform", cpu.cuda_calls_on_cpu))
        stack.enter_context(patch.object(cpu, "CPU", META))
        for module in (factory, model):
            stack.enter_context(patch.object(module, "local_device", lambda: META))
        for name in ("megarl.learner.model.on_cuda", "megarl.learner.patches.on_cuda"):
            stack.enter_context(patch(name, lambda: True))
        cpu.keep_random_state()  # a generator cannot be on the meta device
        yield


class LazyAdam(torch.optim.Optimizer):
    """Adam as Transformer Engine and apex make it: no state before the first step, and one step for each group."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, defaults)
        assert adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                mean, scale = (
                    state[name] / (1 - beta ** group["step"])
                    for name, beta in (("exp_avg", first), ("exp_avg_sq", second))
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (scale.sqrt() + group["eps"]))


@contextmanager
def lazy_adam() -> Iterator[None]:
    """Let Megatron-Core use `LazyAdam`, as it uses the Adam of an installed apex."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    of_apex: dict[str, Any] = {"HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True, "USING_TE_OPTIMIZER": False}
    with (
        patch.multiple(optimizer, Adam=LazyAdam, USING_PYTORCH_OPTIMIZER=False),
        patch.multiple(distrib_optimizer, Adam=LazyAdam, create=True, **of_apex),
    ):
        yield
