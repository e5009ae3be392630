"""Where a model's parameters, gradients and optimizer state lie between the phases that use them.

Only CUDA memory is scarce in this sense: on the CPU everything is in host memory already and nothing moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.learner.config import MegatronSection
from megarl.learner.optimizer import torch_optimizers


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Brings parts of one model to the device for the time of a block and takes them away again."""

    models: tuple[Any, ...]  # the chunks: GPTModel, or Megatron's DistributedDataParallel around it
    optimizer: Any | None  # MegatronOptimizer
    section: MegatronSection
    host: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)  # of a model without an optimizer

    def park(self) -> None:
        """Take everything the section names off the device; what is not needed now, before the first phase."""
        if torch.cuda.is_available():
            if self.section.param_offload:
                self._move_parameters("cpu")
            if self.section.grad_offload:
                self._move_gradients("cpu")
            if self.section.optimizer_offload:
                self._move_optimizer("cpu")
            torch.cuda.empty_cache()

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """The block needs the parameters; what torch's allocator kept of it is free for the engine afterwards."""
        try:
            with self._here(self._move_parameters, self.section.param_offload):
                yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    @contextmanager
    def everything(self) -> Iterator[None]:
        """The block trains: it needs parameters, gradients and optimizer state."""
        with (
            self.parameters(),
            self._here(self._move_gradients, self.section.grad_offload),
            self._here(self._move_optimizer, self.section.optimizer_offload),
        ):
            yield

    @contextmanager
    def _here(self, move: Any, wanted: bool) -> Iterator[None]:
        if not (wanted and torch.cuda.is_available()):
            yield
            return
        move("cuda")
        try:
            yield
        finally:
            move("cpu")

    def _move_parameters(self, device: str) -> None:
        if self.optimizer is not None:
            self._move_buffers(device, move_params=True, move_grads=False)
            return
        for parameter in (parameter for model in self.models for parameter in model.parameters()):
            if device == "cpu":
                copy = self.host.setdefault(parameter, torch.empty_like(parameter, device="cpu", pin_memory=True))
                copy.copy_(parameter)
                parameter.data = copy
            else:
                parameter.data = self.host[parameter].to(device, non_blocking=True)

    def _move_gradients(self, device: str) -> None:
        if self.optimizer is not None:
            self._move_buffers(device, move_params=False, move_grads=True)

    def _move_buffers(self, device: str, **parts: bool) -> None:
        for model in self.models:
            for buffer in model.buffers + model.expert_parallel_buffers:
                (buffer.offload_to_cpu if device == "cpu" else buffer.reload_from_cpu)(**parts)

    def _move_optimizer(self, device: str) -> None:
        for optimizer in torch_optimizers(self.optimizer) if self.optimizer else ():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[name] = value.to(device, non_blocking=device == "cuda")
            if self.section.dtype != "float32":  # in float32 the optimizer works on the parameters themselves
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.data = parameter.data.to(device, non_blocking=device == "cuda")
