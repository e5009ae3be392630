"""The gradient of a weight that a function of ours computes, added straight to where Megatron sums it."""

from typing import Any

import torch
from torch import Tensor

from megarl.learner.overlap import is_awaited


class WeightGradient:
    """The gradient of a weight, as a float32 sum over products.

    It is added straight into the buffer of Megatron's DistributedDataParallel (`main_grad`) if the weight has one.
    Otherwise a micro-batch needs another float32 copy of the weight, and passes over both.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        main = getattr(weight, "main_grad", None)
        self._is_added = main is not None
        self._sum = torch.zeros_like(weight, dtype=torch.float32) if main is None else main

    def add(self, grad_output: Tensor, hidden: Tensor) -> None:
        """Add the product of [n, rows] gradients of `hidden @ weight.T` and the [n, columns] states."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            torch.addmm(self._sum, grad_output.T, hidden, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum.addmm_(grad_output.T.float(), hidden.float())

    def to_return(self) -> Tensor | None:
        """Return what autograd takes for the weight's gradient: nothing, if the gradient is added and no hook waits.

        A hook of Megatron that waits for a gradient drops it unread, as the weight's mark demands. So the gradient is
        an alias of the weight, which takes neither memory nor a kernel. The weight of a tied head has no such mark:
        its hook waits for the embedding's gradient, and reads that.
        """
        weight: Any = self._weight
        if not self._is_added:
            return self._sum.to(weight.dtype)
        if not is_awaited(weight) or getattr(weight, "zero_out_wgrad", False):
            return None
        assert weight.grad is None, "autograd would add to the weight itself"
        weight.grad_added_to_main_grad = True
        alias: Tensor = weight.detach()
        return alias
