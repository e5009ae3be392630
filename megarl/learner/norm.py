"""RMS normalisation that supports sequence parallelism, for machines without Transformer Engine.

Megatron-Core's own fallback refuses sequence parallelism. Support takes one mark: every tensor-parallel rank applies
the weight to its own tokens, so its gradients must be summed over these ranks, and Megatron sums the gradients of
weights marked `sequence_parallel`.
"""

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, dtype=config.params_dtype)
        self.epsilon = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size]; the result has the dtype of `hidden`."""
        hidden32 = hidden.float()
        scale = torch.rsqrt(hidden32.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (hidden32 * scale).to(hidden.dtype)
