import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.config import EXACT, STRAIGHT_THROUGH, ExactKL, SampledKL, StraightThroughKL
from megarl.algorithms.kl import AdaptiveKL, Divergence, FixedKL, kl_penalty

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


def value_and_gradient(kind: Any, difference: list[float], k3_bound: float | None) -> tuple[list[float], list[float]]:
    log_probs = torch.tensor(difference, dtype=torch.float64, requires_grad=True)
    estimate = kl_penalty(log_probs, torch.zeros_like(log_probs), kind=kind, k3_bound=k3_bound)
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    return estimate.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("k1+", [2.0, -3.0]),
        ("kl+", [2.0, -3.0]),
        ("abs+", [2.0, 3.0]),
        ("k3+", [math.exp(-2.0) + 1.0, 10.0]),  # unbounded, the second is exp(3) - 4 = 16.1
        ("low_var_kl+", [math.exp(-2.0) + 1.0, 10.0]),
    ],
)
def test_straight_through_kinds_by_hand(kind: StraightThroughKL, values: list[float]) -> None:
    assert value_and_gradient(kind, [2.0, -3.0], 10.0) == (pytest.approx(values), [2.0, -3.0])


@given(
    kind=st.sampled_from(STRAIGHT_THROUGH),
    difference=st.lists(st.floats(-300.0, 300.0), min_size=1, max_size=5),
    k3_bound=st.none() | st.floats(0.1, 20.0),
)
def test_plus_joins_value_to_gradient_of_k2(
    kind: StraightThroughKL, difference: list[float], k3_bound: float | None
) -> None:
    values, gradient = value_and_gradient(kind, difference, k3_bound)
    assert values == value_and_gradient(kind.removesuffix("+"), difference, k3_bound)[0]
    assert gradient == value_and_gradient("k2", difference, k3_bound)[1]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kinds_average_to_the_divergence(kind: SampledKL) -> None:
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    expected = (policy * kl_penalty(policy.log(), reference.log(), kind=kind)).sum()
    torch.testing.assert_close(expected, exact)


@pytest.mark.parametrize(
    ("kind", "gradient_of"),
    [("k1", "nothing"), ("k2", "KL(policy || reference)"), ("k3", "KL(reference || policy)")]
    + [(kind, "KL(policy || reference)") for kind in STRAIGHT_THROUGH],
)
def test_what_each_kind_is_as_a_loss(kind: SampledKL, gradient_of: str) -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    log_p = logits.log_softmax(-1)
    expected_loss = (log_p.exp().detach() * kl_penalty(log_p, reference, kind=kind)).sum()  # over sampled tokens
    (gradient,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    exact = {
        "nothing": 0.0 * logits.sum(),
        "KL(policy || reference)": (log_p.exp() * (log_p - reference)).sum(),
        "KL(reference || policy)": (reference.exp() * (reference - log_p)).sum(),
    }[gradient_of]
    torch.testing.assert_close(gradient, *torch.autograd.grad(exact, logits))


POLICY = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
TEACHER = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (Divergence("full"), 0.25 * D),
        (Divergence("full_forward"), 0.25 * D),
        # The mixture of equal shares is (3/8, 1/4, 3/8), and the two divergences from it are equal.
        (Divergence("full_js"), 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        # A quarter of the teacher: (7/16, 1/4, 5/16).
        (
            Divergence("full_js", 0.25),
            0.25 * (0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5))
            + 0.75 * (0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)),
        ),
    ],
    ids=str,
)
def test_each_exact_kind_by_hand(divergence: Divergence, expected: float) -> None:
    summands, _ = divergence.summands(POLICY.log()[None], TEACHER.log()[None])
    assert summands.sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", EXACT)
def test_exact_divergence_gradients_match_finite_differences(kind: ExactKL) -> None:
    divergence, logits = Divergence(kind, 0.3), torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float64)

    def value(z: torch.Tensor) -> float:
        return float(divergence.summands(z.log_softmax(-1), TEACHER.log()[None])[0].sum())

    log_p = logits.log_softmax(-1)
    _, slope = divergence.summands(log_p, TEACHER.log()[None])
    gradient = slope - log_p.exp() * slope.sum()
    for place, step in enumerate(1e-6 * torch.eye(3, dtype=torch.float64)):
        assert gradient[0, place].item() == pytest.approx(
            (value(logits + step) - value(logits - step)) / 2e-6, abs=1e-8
        )


def test_scaled_jensen_shannon_approaches_forward_and_reverse_kl() -> None:
    """As the share of the teacher vanishes, JS / beta becomes the forward divergence; as it grows, the reverse one."""
    for beta, kind, share in ((1e-6, "full_forward", 1e-6), (1.0 - 1e-6, "full", 1e-6)):
        js, _ = Divergence("full_js", beta).summands(POLICY.log()[None], TEACHER.log()[None])
        limit, _ = Divergence(kind).summands(POLICY.log()[None], TEACHER.log()[None])  # type: ignore[arg-type]
        assert js.sum().item() / share == pytest.approx(limit.sum().item(), rel=1e-5)


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


@pytest.mark.parametrize(("current_kl", "factor"), [(10.0, 1.2), (0.0, 0.8)])
@pytest.mark.parametrize("num_steps", [1_000, 5_000, 65_536])
def test_samples_beyond_horizon_do_not_count(num_steps: int, current_kl: float, factor: float) -> None:
    """Else the weight of a large batch would be 0 or negative, and reward what it penalises."""
    controller = AdaptiveKL(0.5, target=0.2, horizon=1_000).update(current_kl, num_steps=num_steps)
    assert controller.coef == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("current_kl", [math.nan, math.inf, -math.inf])
def test_adaptive_coefficient_ignores_non_finite_divergence(current_kl: float) -> None:
    controller = AdaptiveKL(0.5, target=0.2, horizon=10_000)
    assert controller.update(current_kl, num_steps=100) == controller
