"""Norms that support sequence parallelism, for machines without Transformer Engine.

Megatron-Core's own fallback refuses sequence parallelism. Support takes one mark: every tensor-parallel rank applies
the weight to its own tokens, so its gradients must be summed over these ranks, and Megatron sums the gradients of
weights marked `sequence_parallel`.
"""

from typing import Any

import torch
from torch import Tensor


class Normalization(torch.autograd.Function):
    """`weight * (x / rms(x))`, computed in float32. It keeps `x` and one number per token for the backward pass.

    With s = 1 / rms(x) and the gradient g of the normalised x:  d/dx = s g - x s^3 mean(g x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise [..., n] by a weight [n]; the result has the dtype of `x`."""
        if x.is_cuda:
            from megarl.learner.kernels import norm as kernels

            out, scale = kernels.normalise(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        x32 = x.float()
        scale = (torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and `weight`."""
        x, weight, scale = ctx.saved_tensors
        if x.is_cuda:
            from megarl.learner.kernels import norm as kernels

            return *kernels.gradients(x, weight, scale, gradient), None
        x32 = x.float()
        of_normalised = (gradient * weight).float()
        of_weight = (gradient * (x32 * scale).to(x.dtype)).flatten(0, -2).sum(0)
        slope = (of_normalised * x32).mean(-1, keepdim=True).mul_(scale.pow(3))
        of_x = of_normalised.mul_(scale).addcmul_(x32, slope, value=-1)
        return of_x.to(x.dtype), of_weight, None


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, dtype=config.params_dtype)
        self.epsilon = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size]; the result has the dtype of `hidden`."""
        normalised: Tensor = Normalization.apply(hidden, self.weight, self.epsilon)
        return normalised


class LayerNorm(torch.nn.LayerNorm):
    """Layer normalisation over the last dimension (Ba et al., 2016, arXiv:1607.06450)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
