"""Norms that support sequence parallelism, for machines without Transformer Engine.

Megatron-Core's own fallback refuses sequence parallelism. Support takes one mark: every tensor-parallel rank applies
the weight to its own tokens, so its gradients must be summed over these ranks, and Megatron sums the gradients of
weights marked `sequence_parallel`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.learner.context import Context


class Normalization(torch.autograd.Function):
    """`weight * (x / rms(x))`, computed in float32. It keeps `x` and one number per token for the backward pass.

    With s = 1 / rms(x) and the gradient g of the normalised x:  d/dx = s g - x s^3 mean(g x).
    """

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, weight: Tensor, eps: float) -> Tensor:
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
    def backward(ctx: Context[None], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and `weight`."""
        x, weight, scale = ctx.saved_tensors
        if x.is_cuda:
            from megarl.learner.kernels import norm as kernels

            return *kernels.gradients(x, weight, scale, gradient), None
        return *_gradients(x, weight, scale, gradient, None), None


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019), computed in float32.

    With `config.layernorm_zero_centered_gamma` it multiplies by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, dtype=config.params_dtype)
        self.epsilon = eps
        self.is_centred = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size]; the result has the dtype of `hidden`."""
        weight = self.weight.float() + 1 if self.is_centred else self.weight
        normalised: Tensor = Normalization.apply(hidden, weight, self.epsilon)
        return normalised


class WideNormalization(torch.autograd.Function):
    """`Normalization` of rows whose numbers the ranks of a group share; each rank has a part of rows and weight."""

    @staticmethod
    def forward(
        ctx: Context[dist.ProcessGroup], x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup
    ) -> Tensor:
        """Normalise [..., n] by a weight [n]; the result has the dtype of `x`."""
        x32 = x.float()
        ctx.settings = group
        scale = _mean(x32.square(), group).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Context[dist.ProcessGroup], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and `weight`."""
        x, weight, scale = ctx.saved_tensors
        return *_gradients(x, weight, scale, gradient, ctx.settings), None, None


def _gradients(
    x: Tensor, weight: Tensor, scale: Tensor, gradient: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `weight`; `group` shares the numbers of a row."""
    x32 = x.float()
    of_normalised = (gradient * weight).float()
    of_weight = (gradient * (x32 * scale).to(x.dtype)).flatten(0, -2).sum(0)
    slope = _mean(of_normalised * x32, group).mul_(scale.pow(3))
    of_x = of_normalised.mul_(scale).addcmul_(x32, slope, value=-1)
    return of_x.to(x.dtype), of_weight


def _mean(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean over the last dimension; every rank of `group` has an equal part of it."""
    mean = part.mean(-1, keepdim=True)
    if group is not None and group.size() > 1:
        dist.all_reduce(mean, group=group)
        mean /= group.size()
    return mean


class RowSharded(torch.nn.Module):
    """A module whose own parameters are cut in their first dimension over the tensor-parallel ranks."""

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: Sequence[tuple[int, int, int]], metadata: object
    ) -> ShardedStateDict:
        """Return Megatron's description of the parameters."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)


class WideRMSNorm(RowSharded):
    """A norm over the queries or keys of all heads together. Each tensor-parallel rank has its heads' weights."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, *, heads: str) -> None:
        """Make the norm of as many heads as the field `heads` of the configuration says."""
        super().__init__()
        self.epsilon = eps
        self.group = parallel_state.get_tensor_model_parallel_group()
        size = getattr(config, heads) * config.kv_channels // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [..., heads, head_dim], the heads of this rank."""
        normalised: Tensor = WideNormalization.apply(heads.flatten(-2), self.weight, self.epsilon, self.group)
        return normalised.view_as(heads)


class LayerNorm(torch.nn.LayerNorm):
    """Layer normalisation over the last dimension (Ba et al., 2016, arXiv:1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
