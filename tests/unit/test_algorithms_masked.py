import torch

from megarl.algorithms.masked import masked, masked_mean, masked_moments

X = torch.tensor([[1.0, 2.0, float("nan")], [float("inf"), 6.0, float("nan")]])
MASK = torch.tensor([[True, True, False], [False, True, False]])


def test_masked_values_never_count() -> None:
    assert masked(X, MASK).tolist() == [[1.0, 2.0, 0.0], [0.0, 6.0, 0.0]]
    assert masked_mean(X, MASK).item() == 3.0
    mean, variance = masked_moments(X, MASK)
    assert (mean.item(), variance.item()) == (3.0, 7.0)  # (4 + 1 + 9) / 2


def test_masked_values_get_no_gradient() -> None:
    x = X.clone().requires_grad_()
    (masked(x, MASK) ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 4.0, 0.0], [0.0, 12.0, 0.0]]


def test_an_empty_mask_gives_zeros() -> None:
    nothing = torch.zeros_like(MASK)
    assert masked_mean(X, nothing).item() == 0.0
    assert [moment.item() for moment in masked_moments(X, nothing)] == [0.0, 0.0]


def test_moments_survive_a_large_offset() -> None:
    x = torch.tensor([[4096.0, 4097.0, 4098.0]])
    mean, variance = masked_moments(x, torch.ones(1, 3, dtype=torch.bool))
    assert (mean.item(), variance.item()) == (4097.0, 1.0)
