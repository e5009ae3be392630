"""The place of a model's parameters, gradients and optimizer state between the phases that use them.

Without CUDA everything is in host memory already, and nothing moves. The optimizer's state returns on a stream of its
own while the model computes its first gradients. Parameters return on the stream that computes, because the first
kernel of a phase reads them.

torch keeps the memory that becomes free here for the next phase of the trainer; an engine that wakes up takes it from
torch first.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from megarl.learner.config import MegatronSection
from megarl.learner.optimizer import torch_optimizers
from megarl.platform.device import SideStream, local_device, on_cuda


class RestingMemory(dict[Hashable, torch.Tensor]):
    """Memory of the host in which tensors rest: each in its own, which is pinned once, because pinning is slow."""

    def park(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor in its memory. The copy is complete for the host when the device is idle."""
        if name not in self:
            self[name] = torch.empty_like(tensor, device="cpu", pin_memory=on_cuda())
        return self[name].copy_(tensor, non_blocking=True)


class Offload:
    """Moves parts of one model to the device for the duration of a block, and back to the host afterwards."""

    def __init__(
        self,
        models: tuple[GPTModel | DistributedDataParallel, ...],
        optimizer: MegatronOptimizer | None,
        section: MegatronSection,
        *,
        frozen: RestingMemory | None = None,
    ) -> None:
        """Take the chunks of a model, which are wrapped if there is an optimizer.

        `frozen` is the memory in which the weights that nothing changes rest, if another model shares them.
        """
        self.frozen = RestingMemory() if frozen is None else frozen
        self._models = models
        self._optimizer = optimizer
        self._section = section
        self._host = RestingMemory()
        self._side = SideStream() if optimizer is not None and section.optimizer_offload and on_cuda() else None
        self._is_fetched = False  # whether the optimizer's state is on the device, or on its way there

    def park(self) -> None:
        """Move everything that the section names off the device, before the first phase."""
        if on_cuda():
            self._move_weights_and_gradients("cpu")
            if self._section.optimizer_offload:
                self._move_optimizer("cpu")
            torch.cuda.empty_cache()

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Keep the parameters on the device within the block."""
        is_parked = self._section.param_offload and on_cuda() and not self._is_fetched
        if not is_parked:
            yield
            return
        self._move_parameters("cuda")
        try:
            yield
        finally:
            self._move_parameters("cpu")

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Keep parameters, gradients and the optimizer's state on the device within the block."""
        self.fetch()
        try:
            self.await_optimizer()
            yield
        finally:
            self.release()

    def fetch(self) -> None:
        """Move parameters and gradients to the device, unless they are there, and begin with the optimizer's state."""
        if self._is_fetched or not on_cuda():
            return
        self._is_fetched = True
        self._move_weights_and_gradients("cuda")
        if self._side:
            self._move_optimizer("cuda")

    def await_optimizer(self) -> None:
        """Let the device continue when the optimizer's state is there; to be called before anything reads the state."""
        if self._side:
            self._side.join()

    def release(self) -> None:
        """Move what `fetch` has brought off the device again."""
        if not self._is_fetched:
            return
        self._is_fetched = False
        if self._side:
            self._side.join()
            self._move_optimizer("cpu")
        self._move_weights_and_gradients("cpu")

    def _move_weights_and_gradients(self, device: str) -> None:
        if self._section.param_offload:
            self._move_parameters(device)
        if self._section.grad_offload and self._optimizer is not None:
            self._move_buffers(device, move_params=False, move_grads=True)

    def _move_parameters(self, device: str) -> None:
        if self._optimizer is not None:
            self._move_buffers(device, move_params=True, move_grads=False)
        for place, parameter in self._unchanged():
            if device != "cpu":
                parameter.data = parameter.data.to(local_device(), non_blocking=True, copy=True)
            elif place in self.frozen:
                parameter.data = self.frozen[place]  # nothing has changed it on the device
            else:
                parameter.data = self.frozen.park(place, parameter.data)

    def _unchanged(self) -> Iterator[tuple[Hashable, torch.nn.Parameter]]:
        """Yield the parameters that no optimizer changes, each with a name."""
        for chunk, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                if self._optimizer is None or not parameter.requires_grad:
                    yield (chunk, name), parameter

    def _move_buffers(self, device: str, **parts: bool) -> None:
        for model in self._models:
            for buffer in model.buffers + model.expert_parallel_buffers:
                if device == "cpu":
                    buffer.offload_to_cpu(**parts)
                else:
                    buffer.reload_from_cpu(**parts)

    def _moved(self, name: Hashable, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Return a tensor of the optimizer in its memory of the host, or on the device when the side stream has it."""
        if device == "cpu":
            return self._host.park(name, tensor)
        assert self._side
        there = torch.empty_like(tensor, device=local_device())
        self._side.copy(there, tensor)
        return there

    def _move_optimizer(self, device: str) -> None:
        for part, optimizer in enumerate(torch_optimizers(self._optimizer) if self._optimizer else ()):
            for place, state in enumerate(optimizer.state.values()):
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[name] = self._moved((part, place, name), value, device)
            if self._section.dtype != "float32":  # in float32 the optimizer works on the parameters themselves
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                for place, parameter in enumerate(parameters):
                    parameter.data = self._moved((part, place), parameter.data, device)
