"""Values that are computed once for a tensor: all layers need the same of the tensor that bounds a packed row."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

FEW = 4
"""Values that are kept. A model works on two rows at once: one goes forwards, and one is computed again."""


class PerTensor(Generic[T]):
    """A value for each of the last `FEW` tensors that exist. Tensors with equal numbers are different keys.

    All rows of a mini-batch exist until its end, and the masks of a row are as large as the square of its length.
    """

    def __init__(self) -> None:
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, compute: Callable[[], T]) -> T:
        """Return the value of the tensor. Compute it if there is none yet."""
        if tensor not in self._values:
            for earlier in list(self._values)[: 1 - FEW]:
                del self._values[earlier]
            self._values[tensor] = compute()
        value: T = self._values[tensor]
        return value
