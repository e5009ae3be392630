"""The norm and its gradient equal the formula."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.learner.norm import RMSNorm

EPS = 1e-3


def by_formula(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_it_is_the_formula(dtype: torch.dtype, tolerance: float, is_centred: bool) -> None:
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=is_centred)
    norm = RMSNorm(config, 16, eps=EPS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16, generator=generator))
    x = (0.1 * torch.randn(5, 2, 16, generator=generator)).to(dtype)
    x[0] = 0.0  # only epsilon is left
    x.requires_grad_()
    out, expected = norm(x), by_formula(x, norm.weight + is_centred)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    slope = torch.randn(out.shape, generator=generator).to(dtype)
    found, wanted = (torch.autograd.grad(y, [x, norm.weight], slope) for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=10 * tolerance, atol=10 * tolerance)
