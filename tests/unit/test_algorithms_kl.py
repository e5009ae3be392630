import math

import pytest
import torch

from megarl.algorithms.config import SampledKL
from megarl.algorithms.kl import AdaptiveKL, FixedKL, full_kl, kl_penalty

D = math.log(2.0)


@pytest.mark.parametrize(
    ("kind", "above", "below"),  # the policy gives the token twice and half the reference's probability
    [
        ("kl", D, -D),
        ("k1", D, -D),
        ("abs", D, D),
        ("mse", D**2 / 2, D**2 / 2),
        ("k2", D**2 / 2, D**2 / 2),
        ("low_var_kl", 0.5 + D - 1.0, 2.0 - D - 1.0),
        ("k3", 0.5 + D - 1.0, 2.0 - D - 1.0),
    ],
)
def test_each_kind_by_hand(kind: SampledKL, above: float, below: float) -> None:
    log_probs = torch.log(torch.tensor([0.4, 0.1]))
    ref_log_probs = torch.log(torch.tensor([0.2, 0.2]))
    assert kl_penalty(log_probs, ref_log_probs, kind=kind).tolist() == pytest.approx([above, below], rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kinds_average_to_the_divergence(kind: SampledKL) -> None:
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    expected = (policy * kl_penalty(policy.log(), reference.log(), kind=kind)).sum()
    torch.testing.assert_close(expected, exact)


@pytest.mark.parametrize(
    ("kind", "gradient_of"), [("k1", "nothing"), ("k2", "KL(policy || reference)"), ("k3", "KL(reference || policy)")]
)
def test_what_each_kind_is_as_a_loss(kind: SampledKL, gradient_of: str) -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    log_p = logits.log_softmax(-1)
    expected_loss = (log_p.exp().detach() * kl_penalty(log_p, reference, kind=kind)).sum()  # over sampled tokens
    (gradient,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    exact = {
        "nothing": 0.0 * logits.sum(),
        "KL(policy || reference)": full_kl(log_p, reference),
        "KL(reference || policy)": full_kl(reference, log_p),
    }[gradient_of]
    torch.testing.assert_close(gradient, *torch.autograd.grad(exact, logits))


def test_full_by_hand() -> None:
    policy = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    reference = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    log_p = policy.log().requires_grad_()
    divergence = full_kl(log_p, reference.log())
    torch.testing.assert_close(divergence, torch.tensor([0.5 * D - 0.25 * D, D]))  # a token ruled out adds nothing
    divergence.sum().backward()
    assert log_p.grad is not None
    assert log_p.grad.isfinite().all()


def test_k3_stays_finite_far_from_the_reference() -> None:
    log_probs = torch.tensor([-200.0, -1.0], requires_grad=True)
    kl = kl_penalty(log_probs, torch.tensor([-1.0, -200.0]), kind="k3")
    kl.sum().backward()
    assert kl.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_a_bound_holds_k3_and_its_gradient(kind: SampledKL) -> None:
    log_probs = torch.tensor([-26.0, -4.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0])
    kl = kl_penalty(log_probs, reference, kind=kind, k3_bound=10.0)
    assert kl.tolist() == pytest.approx([10.0, 10.0, 0.0])  # unbounded, the second is exp(3) - 4 = 16.1
    kl.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]
    free = kl_penalty(log_probs, reference, kind=kind)
    assert free[1].item() == pytest.approx(math.exp(3.0) - 4.0)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2"])
def test_the_bound_is_that_of_k3_alone(kind: SampledKL) -> None:
    log_probs, reference = torch.tensor([-26.0, -1.0]), torch.tensor([-1.0, -26.0])
    assert torch.equal(
        kl_penalty(log_probs, reference, kind=kind, k3_bound=0.5), kl_penalty(log_probs, reference, kind=kind)
    )


def test_a_fixed_weight_stays() -> None:
    assert FixedKL(0.1).update(100.0, num_steps=1000) == FixedKL(0.1)


@pytest.mark.parametrize(
    ("current_kl", "factor"),
    [(0.2, 1.0), (0.22, 1.001), (10.0, 1.002), (0.18, 0.999), (0.0, 0.998)],  # the error is clipped at +-0.2
)
def test_an_adaptive_weight_follows_the_error(current_kl: float, factor: float) -> None:
    controller = AdaptiveKL(0.5, target=0.2, horizon=10_000).update(current_kl, num_steps=100)
    assert controller.coef == pytest.approx(0.5 * factor)
    assert (controller.target, controller.horizon) == (0.2, 10_000)


@pytest.mark.parametrize("current_kl", [math.nan, math.inf, -math.inf])
def test_an_adaptive_weight_stays_where_the_divergence_is_not_finite(current_kl: float) -> None:
    controller = AdaptiveKL(0.5, target=0.2, horizon=10_000)
    assert controller.update(current_kl, num_steps=100) == controller
