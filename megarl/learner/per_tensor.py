"""Values that are computed once for a tensor: all layers need the same of the tensor that bounds a packed row."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class PerTensor(Generic[T]):
    """A value for each tensor, as long as the tensor exists. Tensors with equal numbers are different keys."""

    def __init__(self) -> None:
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, compute: Callable[[], T]) -> T:
        """Return the value of the tensor. Compute it if there is none yet."""
        if tensor not in self._values:
            self._values[tensor] = compute()
        value: T = self._values[tensor]
        return value
