"""Rotations of packed rows equal complex multiplication, forward and backward, on every context-parallel rank."""

import pytest
import torch
from torch import Tensor

from megarl.learner.packed import places_of
from megarl.learner.rotary import rotate

LENGTHS = torch.tensor([8, 4, 12])
BOUNDS = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
SIZE, HEAD_DIM = 6, 8


def angles() -> Tensor:
    """Return the angles of 12 positions in Megatron's form, each pair's angle twice."""
    frequencies = 10.0 ** -torch.arange(SIZE // 2)
    once = torch.arange(12.0)[:, None] * frequencies
    return torch.cat([once, once], dim=-1)[:, None, None]


def turned(x: Tensor, positions: Tensor, *, scale: float, neighbours: bool) -> Tensor:
    """Rotate by complex numbers."""
    first, second = (
        (x[..., 0:SIZE:2], x[..., 1:SIZE:2]) if neighbours else (x[..., : SIZE // 2], x[..., SIZE // 2 : SIZE])
    )
    by = torch.polar(torch.ones(()), angles()[positions, 0, :, : SIZE // 2])
    product = torch.complex(first, second) * by * scale
    return torch.cat([product.real, product.imag, x[..., SIZE:]], dim=-1)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("cp_rank", "cp_size"), [(0, 1), (0, 2), (1, 2)])
def test_it_is_complex_multiplication(cp_rank: int, cp_size: int, neighbours: bool) -> None:
    places, positions = places_of(LENGTHS, cp_rank, cp_size)
    x = torch.randn(24, 3, HEAD_DIM, generator=torch.Generator().manual_seed(1))[places].requires_grad_()
    out = rotate(x, BOUNDS, angles(), cp_rank=cp_rank, cp_size=cp_size, scale=0.5, neighbours=neighbours)
    expected = turned(x, positions, scale=0.5, neighbours=neighbours)
    torch.testing.assert_close(out, expected)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(*(torch.autograd.grad(y, x, slope)[0] for y in (out, expected)))


def test_models_with_other_angles_share_a_row() -> None:
    x = torch.ones(24, 1, HEAD_DIM)
    one, other = (rotate(x, BOUNDS, factor * angles(), cp_rank=0, cp_size=1) for factor in (1.0, 2.0))
    assert not torch.equal(one, other)
    torch.testing.assert_close(other[2], one[4])  # twice the angle is that of twice the position
