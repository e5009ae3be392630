"""The record of a function of autograd between its forward and its backward pass."""

from typing import Protocol, TypeVar

from torch import Tensor

S = TypeVar("S")


class Context(Protocol[S]):
    """The record that torch hands to both passes, with settings of the function's own."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: S

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors; the backward pass finds them in `saved_tensors`."""
        ...
