"""Rotary position embedding of a packed row (Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.4).

The cosines and sines of a row's positions are computed once for all layers, and no sequence is copied.
"""

import torch
from torch import Tensor

from megarl.learner.context import Context
from megarl.learner.packed import places_of
from megarl.learner.per_tensor import PerTensor

Tables = tuple[Tensor, Tensor]

_tables = PerTensor[PerTensor[Tables]]()  # by the bounds of the row, then by the angles of the model


class Rotation(torch.autograd.Function):
    """Rotate pairs of numbers: (a, b) becomes (a cos - b sin, b cos + a sin)."""

    @staticmethod
    def forward(ctx: Context[bool], x: Tensor, cosines: Tensor, sines: Tensor, neighbours: bool) -> Tensor:
        """See `rotate`."""
        ctx.save_for_backward(cosines, sines)
        ctx.settings = neighbours
        if x.is_cuda:
            from megarl.learner.kernels import rotary as kernels

            return kernels.rotate(x, cosines, sines, from_neighbours=neighbours, to_neighbours=False)
        out = torch.empty_like(x)
        size = 2 * cosines.shape[-1]
        a, b = _pairs(x, size, neighbours)
        c, d = _pairs(out, size)
        torch.mul(a, cosines, out=c).addcmul_(b, sines, value=-1)
        torch.mul(b, cosines, out=d).addcmul_(a, sines)
        out[..., size:] = x[..., size:]
        return out

    @staticmethod
    def backward(ctx: Context[bool], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back."""
        cosines, sines = ctx.saved_tensors
        if gradient.is_cuda:
            from megarl.learner.kernels import rotary as kernels

            back = kernels.rotate(gradient, cosines, -sines, from_neighbours=False, to_neighbours=ctx.settings)
            return back, None, None, None
        out = torch.empty_like(gradient)
        size = 2 * cosines.shape[-1]
        a, b = _pairs(out, size, ctx.settings)
        c, d = _pairs(gradient, size)
        torch.mul(c, cosines, out=a).addcmul_(d, sines)
        torch.mul(d, cosines, out=b).addcmul_(c, sines, value=-1)
        out[..., size:] = gradient[..., size:]
        return out, None, None, None


def rotate(
    x: Tensor,
    bounds: Tensor,
    angles: Tensor,
    *,
    cp_rank: int,
    cp_size: int,
    scale: float = 1.0,
    neighbours: bool = False,
) -> Tensor:
    """Rotate the queries or keys of a packed row by their positions.

    Args:
        x: [N, heads, head_dim] of this rank's tokens.
        bounds: [S + 1] int32, of the sequences in the whole row.
        angles: [positions, 1, 1, size] float32, the angle of each pair twice; the first `size` numbers of a head are
            rotated.
        cp_rank: this rank's position in its context-parallel group.
        cp_size: the size of the group.
        scale: multiplies the rotated numbers.
        neighbours: the numbers of a pair are neighbours in `x`; else they have the same place in both halves of `size`,
            as always in the result.
    """

    def tables() -> Tables:
        positions = places_of(bounds.diff().long(), cp_rank, cp_size, len(x))[1]
        of_row = angles[:, 0, :, : angles.shape[-1] // 2].index_select(0, positions)
        return (of_row.cos() * scale).to(x.dtype), (of_row.sin() * scale).to(x.dtype)

    rotated: Tensor = Rotation.apply(x, *_tables.get(bounds, PerTensor).get(angles, tables), neighbours)
    return rotated


def _pairs(x: Tensor, size: int, neighbours: bool = False) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second numbers of all pairs among the first `size` numbers."""
    if neighbours:
        return x[..., 0:size:2], x[..., 1:size:2]
    return x[..., : size // 2], x[..., size // 2 : size]
