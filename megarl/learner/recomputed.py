"""Tensors of each micro-batch that a module takes besides its input, also when a backward pass computes it again."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class PerMicroBatch:
    """A tensor for each micro-batch that one module computes; None if there is nothing to take."""

    def __init__(self) -> None:
        self.is_in_forward = False  # False within a backward pass, which computes a checkpoint's activations again
        self._current: Tensor | None = None  # of the micro-batch in the forward pass
        self._postponed = deque[Tensor | None]()  # of micro-batches that will be computed again

    def take(self, *, is_training: bool) -> Tensor | None:
        """Return the tensor of the micro-batch that is computed: in a backward pass, the oldest that was postponed."""
        if not self.is_in_forward:
            return self._postponed.popleft() if self._postponed else None
        if is_training and not torch.is_grad_enabled():  # within a checkpoint of activations
            self._postponed.append(self._current)
        return self._current

    @contextmanager
    def set_to(self, tensor: Tensor | None) -> Iterator[None]:
        """Let `tensor` belong to the micro-batch in the forward pass within the block."""
        self.is_in_forward, self._current = True, tensor
        try:
            yield
        finally:
            self.is_in_forward, self._current = False, None

    def clear(self) -> None:
        """Forget micro-batches that were not computed again."""
        self._postponed.clear()
