import math
import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms import advantages as estimators
from megarl.algorithms.advantages import (
    gae,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    token_rewards,
    whiten,
)
from megarl.algorithms.config import ESTIMATORS
from megarl.algorithms.masked import masked_moments

NAN = float("nan")
SEEDS = st.integers(0, 2**31)


def random_batch(seed: int, num_tensors: int, shape: tuple[int, int] = (6, 9)) -> tuple[Tensor, list[Tensor]]:
    """A mask with holes in every row, and tensors that are NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.7
    return mask, [torch.randn(shape, generator=generator).masked_fill(~mask, NAN) for _ in range(num_tensors)]


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, lam=0.5)
    # delta_2 = 1 - 0.7 = 0.3; delta_1 = 0.35 - 0.6 = -0.25; delta_0 = 0.3 - 0.5 = -0.2
    expected = [[-0.2 + 0.25 * (-0.25 + 0.25 * 0.3), -0.25 + 0.25 * 0.3, 0.3]]
    torch.testing.assert_close(advantages, torch.tensor(expected))
    torch.testing.assert_close(returns, advantages + values)


def test_gae_skips_masked_tokens() -> None:
    mask = torch.tensor([[True, False, True, True, False]])
    rewards = torch.tensor([[0.3, NAN, -0.2, 1.0, NAN]])
    values = torch.tensor([[0.5, NAN, 0.1, 0.2, NAN]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    dense = torch.ones(1, 3, dtype=torch.bool)
    dense_advantages, dense_returns = gae(rewards[mask][None], values[mask][None], dense, gamma=0.9, lam=0.8)
    assert torch.equal(advantages[mask], dense_advantages[0])
    assert torch.equal(returns[mask], dense_returns[0])
    assert advantages[~mask].tolist() == returns[~mask].tolist() == [0.0, 0.0]


@given(seed=SEEDS, gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_is_the_sum_of_discounted_errors(seed: int, gamma: float, lam: float) -> None:
    mask, (rewards, values) = random_batch(seed, 2)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        r, v = rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist()
        v_next = [*v[1:], 0.0]
        delta = [r[t] + gamma * v_next[t] - v[t] for t in range(len(r))]
        expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
        assert advantages[row][mask[row]].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert returns[row][mask[row]].tolist() == pytest.approx(
            [a + b for a, b in zip(expected, v, strict=True)], rel=1e-4, abs=1e-5
        )
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_gae_of_a_row_is_independent_of_batch() -> None:
    mask, (rewards, values) = random_batch(3, 2, shape=(7, 1000))
    together, _ = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    for row in range(len(mask)):
        padded = [pad(x[row : row + 1], (0, 333)) for x in (rewards, values, mask)]
        alone, _ = gae(*padded, gamma=0.99, lam=0.95)
        assert torch.equal(alone[0, :1000], together[row])


def test_undiscounted_monte_carlo_returns_are_the_score() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rewards = torch.tensor([[0.0, 0.0, 2.0], [0.0, -1.0, 0.0]])
    _, returns = gae(rewards, torch.rand(2, 3), mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, 0.0]]))


def test_grpo_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 5.0, 0.0, 3.0]), torch.tensor([7, 2, 7, 2, 7])
    mask = torch.tensor([[True, True]] * 4 + [[True, False]])
    advantages = grpo(scores, groups, mask, norm_adv_by_std_in_grpo=True)
    # group 7: mean 3, deviations -2, 2, 0, unbiased std 2; group 2: no difference
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    without = grpo(scores, groups, mask, norm_adv_by_std_in_grpo=False)
    assert without[:, 0].tolist() == [-2.0, 0.0, 2.0, 0.0, 0.0]


@given(
    groups=st.lists(st.integers(0, 4), min_size=1, max_size=16),
    seed=SEEDS,
    norm_adv_by_std_in_grpo=st.booleans(),
)
def test_grpo_is_the_group_normalisation(groups: list[int], seed: int, norm_adv_by_std_in_grpo: bool) -> None:
    scores = torch.randn(len(groups), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(len(groups), 2, dtype=torch.bool)
    advantages = grpo(scores, torch.tensor(groups), mask, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    for sample, group in enumerate(groups):
        members = [float(scores[other]) for other in range(len(groups)) if groups[other] == group]
        expected = float(scores[sample]) - statistics.mean(members)
        if norm_adv_by_std_in_grpo and len(members) > 1:
            expected /= statistics.stdev(members) + 1e-6
        assert advantages[sample].tolist() == pytest.approx([expected] * 2, rel=1e-4, abs=1e-5)


def test_equal_scores_teach_nothing_whatever_their_rounding() -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    advantages = grpo(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64), mask, norm_adv_by_std_in_grpo=True)
    assert advantages.abs().max() < 1e-6


SCORES, GROUPS = torch.tensor([1.0, 0.0, 5.0, 0.0, 3.0, 9.0]), torch.tensor([7, 2, 7, 2, 7, 4])
LENGTHS = torch.tensor([1, 1, 2, 3, 1, 2])
RAGGED = torch.arange(3) < LENGTHS[:, None]  # group 7 scores 1, 5, 3; group 2 scores 0, 0; group 4 is one sample of 9


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (rloo, [1 - 4, 0, 5 - 2, 0, 3 - 3, 0]),
        (reinforce_plus_plus_baseline, [1 - 3, 0, 5 - 3, 0, 3 - 3, 0]),
        (opo, [1 - 14 / 4, 0, 5 - 14 / 4, 0, 3 - 14 / 4, 0]),  # lengths 1, 2, 1
        (partial(grpo_passk, norm_adv_by_std_in_grpo=False), [0, 0, 5 - 3, 0, 0, 0]),
        (partial(grpo_passk, norm_adv_by_std_in_grpo=True), [0, 0, (5 - 3) / 2, 0, 0, 0]),
    ],
)
def test_what_compares_a_group_by_hand(estimator: Callable[..., Tensor], expected: list[float]) -> None:
    advantages = estimator(SCORES, GROUPS, RAGGED)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32)[:, None] * RAGGED)
    order = torch.tensor([5, 3, 1, 4, 0, 2])  # whatever the order of the samples
    torch.testing.assert_close(estimator(SCORES[order], GROUPS[order], RAGGED[order]), advantages[order])


@given(seed=SEEDS, groups=st.lists(st.integers(0, 4), min_size=1, max_size=16))
def test_group_estimators_are_what_their_papers_say(seed: int, groups: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (len(groups),), generator=generator).float()
    lengths = torch.randint(1, 6, (len(groups),), generator=generator)
    mask = torch.arange(5) < lengths[:, None]
    found = {
        estimator: estimator(scores, torch.tensor(groups), mask)[:, 0].tolist()
        for estimator in (rloo, opo, reinforce_plus_plus_baseline)
    }
    passk = grpo_passk(scores, torch.tensor(groups), mask, norm_adv_by_std_in_grpo=False)[:, 0].tolist()
    for sample, group in enumerate(groups):
        members = [other for other in range(len(groups)) if groups[other] == group]
        others = [float(scores[other]) for other in members if other != sample]
        score = float(scores[sample])
        assert found[rloo][sample] == pytest.approx(score - statistics.mean(others) if others else 0.0, abs=1e-5)
        weighted = sum(float(scores[other] * lengths[other]) for other in members)
        optimal = weighted / sum(int(lengths[other]) for other in members)
        assert found[opo][sample] == pytest.approx(score - optimal, abs=1e-5)
        mean = statistics.mean([score, *others])
        assert found[reinforce_plus_plus_baseline][sample] == pytest.approx(score - mean, abs=1e-5)
        # the leave-one-out gradient of the maximum: what a sample adds to the best of the others
        assert passk[sample] == pytest.approx(max(score - max(others), 0.0) if others else 0.0, abs=1e-5)


def test_reinforce_plus_plus_by_hand() -> None:
    mask = torch.tensor([[True, False, True, True], [True, False, False, False]])
    rewards = torch.tensor([[-0.1, NAN, 0.2, 1.0], [2.0, NAN, NAN, NAN]])
    expected = torch.tensor([[-0.1 + 0.5 * (0.2 + 0.5), 0.0, 0.2 + 0.5, 1.0], [2.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(reinforce_plus_plus(rewards, mask, gamma=0.5), expected)


def rewards_in_rows(scores: Tensor, kl: Tensor, mask: Tensor) -> Tensor:
    """Return the token rewards with a coefficient of 0.1, `[B, T]`."""
    num_tokens = torch.full(scores.shape, mask.shape[1])
    return token_rewards(scores, kl.flatten(), mask.flatten(), num_tokens, kl_coef=0.1).view_as(mask)


def test_reinforce_plus_plus_subtracts_future_divergence_from_score() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    log_probs, reference = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -1.0, -0.5]])
    rewards = rewards_in_rows(torch.tensor([3.0]), log_probs - reference, mask)
    torch.testing.assert_close(
        reinforce_plus_plus(rewards, mask, gamma=1.0), torch.tensor([[3.0 - 0.1 * (0.5 - 1.0), 3.0 + 0.1, 3.0]])
    )


def test_remax_by_hand() -> None:
    mask = torch.tensor([[True, False, True, True], [True, False, False, False]])
    rewards = torch.tensor([[-0.1, NAN, 0.2, 1.0], [2.0, NAN, NAN, NAN]])
    expected = torch.tensor([[1.1 - 0.25, 0.0, 1.2 - 0.25, 1.0 - 0.25], [2.0 + 0.5, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(remax(rewards, torch.tensor([0.25, -0.5]), mask), expected)


@given(seed=SEEDS)
def test_remax_charges_tokens_only_for_future_divergence(seed: int) -> None:
    mask, (rewards, kl) = random_batch(seed, 2)
    scores, baselines = rewards.nansum(-1), kl.nansum(-1)
    advantages = remax(rewards_in_rows(scores, kl, mask), baselines, mask)
    for sample, token in mask.nonzero().tolist():
        to_come = kl[sample, token:].nansum()
        assert advantages[sample, token].item() == pytest.approx(
            float(scores[sample] - 0.1 * to_come - baselines[sample]), abs=1e-4
        )


@given(
    groups=st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=4), min_size=1, max_size=5),
    seed=SEEDS,
)
def test_gpg_matches_gradient_without_uninformative_groups(groups: list[list[float]], seed: int) -> None:
    scores = torch.tensor([score for group in groups for score in group])
    members = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    telling = torch.tensor([len(set(group)) > 1 for group in groups for _ in group])
    mask, log_probs = torch.ones(len(scores), 1, dtype=torch.bool), torch.randn(len(scores))
    found = gpg(scores, members, mask)[:, 0]
    assert not found[~telling].any()
    if telling.any():
        alone = gpg(scores[telling], members[telling], mask[telling])[:, 0]
        torch.testing.assert_close((found * log_probs).mean(), (alone * log_probs[telling]).mean())
        mean = statistics.mean(groups[int(members[telling][0])])
        assert alone[0].item() == pytest.approx(float(scores[telling][0]) - mean, abs=1e-6)


def test_token_rewards_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    kl = torch.tensor([[0.5, -1.0, NAN], [0.0, 0.0, 2.0], [NAN, NAN, NAN]])
    rewards = rewards_in_rows(torch.tensor([1.0, -1.0, 8.0]), kl, mask)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 1.1, 0.0], [0.0, 0.0, -1.2], [0.0, 0.0, 0.0]]))


def test_token_rewards_without_penalty_are_scores() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([2.0, 8.0, -1.0]), None, mask, torch.tensor([2, 0, 1]), kl_coef=0.0)
    assert rewards.tolist() == [0.0, 2.0, -1.0]


@given(seed=SEEDS)
def test_whitened_tokens_have_no_mean_and_unit_variance(seed: int) -> None:
    mask, (x,) = random_batch(seed, 1)
    mean, var = masked_moments(x, mask)
    whitened = whiten(x, mask, mean=mean, var=var)
    assert whitened[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whitened[mask].std().item() == pytest.approx(1.0, abs=1e-5)
    assert not whitened[~mask].any()
    top, bottom = (whiten(half, part, mean=mean, var=var) for half, part in zip(x.split(3), mask.split(3), strict=True))
    assert torch.equal(torch.cat([top, bottom]), whitened)


def test_whiten_by_hand() -> None:
    x, mask = torch.tensor([[3.0, 7.0, NAN]]), torch.tensor([[True, True, False]])
    expected = torch.tensor([[-1.0, 1.0, 0.0]])
    torch.testing.assert_close(whiten(x, mask, mean=5.0, var=4.0), expected)
    assert math.isclose(whiten(x, mask, mean=5.0, var=0.0)[0, 0], -2e4, rel_tol=1e-5)


OF_GROUPS = [name for name, needs in ESTIMATORS.items() if needs.compares and not needs.of_batch]


@pytest.mark.parametrize("name", OF_GROUPS)
@given(
    groups=st.lists(st.integers(0, 5), min_size=1, max_size=30).map(sorted),
    seed=st.integers(0, 2**31),
    owners=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_ranks_with_whole_groups_give_every_bit(name: str, groups: list[int], seed: int, owners: list[int]) -> None:
    of_samples = torch.tensor(groups)
    scores = torch.randn(len(groups), generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    keys = {"norm_adv_by_std_in_grpo": True} if ESTIMATORS[name].reads else {}

    def advantages(samples: Tensor) -> Tensor:
        mask = torch.ones(len(samples), 1, dtype=torch.bool)
        found: Tensor = getattr(estimators, name)(scores[samples], of_samples[samples], mask, **keys)
        return found

    expected = advantages(torch.arange(len(groups)))
    for rank in range(3):
        mine = (torch.tensor(owners)[of_samples] == rank).nonzero()[:, 0]
        assert torch.equal(advantages(mine), expected[mine])
