import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import grpo
from megarl.algorithms.config import AlgorithmSection, OverlongBufferSection, RolloutCorrectionSection
from megarl.algorithms.correction import mismatch_means, mismatch_sums
from megarl.algorithms.losses import Totals
from megarl.batch import Prompt, Rewarded
from megarl.training.estimate import mismatch_metrics
from tests.support.estimates import estimate_alone
from tests.support.records import alone, answer, prompts

MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [True, True, False]])
LENGTHS = MASK.sum(-1)
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0], [-1.0, -3.0, 0.0], [-0.5, -0.5, 0.0]])[MASK]
REF = torch.tensor([[-1.0, -2.5, -1.0], [-1.0, 0.0, 0.0], [-1.0, -3.0, 0.0], [-0.5, -0.5, 0.0]])[MASK]
VALUES = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.0, 0.0], [0.2, 0.3, 0.0], [0.0, 1.0, 0.0]])[MASK]


def scored() -> Rewarded:
    prompts = [
        Prompt(index=i, token_ids=[1] * length, text="", data_source="", ground_truth=None, extra_info={})
        for i, length in enumerate([3, 5])
    ]
    return Rewarded(
        prompts=prompts,
        groups=torch.tensor([0, 0, 1, 1]),
        num_tokens=LENGTHS,
        responses=torch.zeros(8, dtype=torch.int32),
        mask=torch.ones(8, dtype=torch.bool),
        rollout_log_probs=OLD,
        truncated=torch.tensor([True, False, False, False]),
        scores=torch.tensor([1.0, 0.0, 0.5, -0.5]),
    )


def test_ppo_estimates_from_rewards_less_the_divergence() -> None:
    experience, metrics = estimate_alone(scored(), OLD, REF, VALUES, algorithm=AlgorithmSection(), kl_coef=0.1)
    # kl: row 0 has 1.5 on token 1, row 1 has -1 on token 0; gamma = lam = 1: returns are rewards to go
    expected = torch.tensor([[0.85, 0.85, 1.0], [0.1, 0.0, 0.0], [0.5, 0.5, 0.0], [-0.5, -0.5, 0.0]])[MASK]
    torch.testing.assert_close(experience.returns, expected)
    raw = expected - VALUES
    torch.testing.assert_close(experience.advantages, (raw - raw.mean()) / raw.std())
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.25,
            "critic/score/max": 1.0,
            "critic/score/min": -0.5,
            "critic/rewards/mean": (0.85 + 0.1 + 0.5 - 0.5) / 4,
            "critic/rewards/max": 0.85,
            "critic/rewards/min": -0.5,
            "critic/advantages/mean": 0.0,
            "critic/advantages/max": float(experience.advantages.max()),
            "critic/advantages/min": float(experience.advantages.min()),
            "critic/returns/mean": (0.85 + 0.85 + 1.0 + 0.1 + 1.0 - 1.0) / 8,
            "critic/returns/max": 1.0,
            "critic/returns/min": -0.5,
            "critic/values/mean": 3.1 / 8,
            "critic/values/max": 1.0,
            "critic/values/min": 0.0,
            "critic/vf_explained_var": 1.0 - float(raw.var() / (expected.var() + 1e-5)),
            "response_length/mean": 2.0,
            "response_length/max": 3.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 0.25,
            "prompt_length/mean": 4.0,
            "prompt_length/max": 5.0,
            "prompt_length/min": 3.0,
            "actor/reward_kl_penalty": (0.5 - 1.0 + 0.0 + 0.0) / 4,
            "actor/reward_kl_penalty_coeff": 0.1,
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_grpo_needs_neither_critic_nor_reference() -> None:
    algorithm = AlgorithmSection(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    experience, metrics = estimate_alone(scored(), OLD, None, None, algorithm=algorithm, kl_coef=None)
    assert experience.advantages.tolist() == [*[0.5] * 3, -0.5, *[0.5] * 2, *[-0.5] * 2]
    assert experience.ref_log_probs is None
    assert not experience.values.any()
    assert not experience.returns.any()
    assert not [name for name in metrics if "kl" in name or "values" in name or "vf_" in name]


def test_grpo_subtracts_kl_from_reward_if_enabled() -> None:
    algorithm = AlgorithmSection(adv_estimator="grpo")
    experience, _ = estimate_alone(scored(), OLD, REF, None, algorithm=algorithm, kl_coef=0.1)
    rewards = torch.tensor([1.0 - 0.15, 0.1, 0.5, -0.5])
    expected = grpo(rewards, torch.tensor([0, 0, 1, 1]), MASK, norm_adv_by_std_in_grpo=True)
    torch.testing.assert_close(experience.advantages, expected[MASK])


def test_mismatch_compares_probabilities_of_real_tokens() -> None:
    trainer = torch.log(torch.tensor([0.5, 0.2, 0.9]))
    engine = torch.log(torch.tensor([0.4, 0.2, 0.1]))
    mask = torch.tensor([True, True, False])  # the last token is one of an environment
    drawn = replace(answer(prompts([1]), [3]), mask=mask, rollout_log_probs=engine)
    metrics = mismatch_metrics(alone(drawn), trainer)
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_mean": 0.05,
            "training/rollout_probs_diff_std": 0.05 * math.sqrt(2.0),
        }
        | mismatch_means(mismatch_sums(trainer[:2], engine[:2], torch.tensor([2]))),
        rel=1e-5,
    )
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((1.25**2 - 1.0) / 2)
    assert mismatch_metrics(alone(replace(drawn, rollout_log_probs=None)), trainer) == {}


def test_remax_subtracts_greedy_reward_from_each_sample() -> None:
    algorithm, baselines = AlgorithmSection(adv_estimator="remax"), torch.tensor([0.25, 0.25, 0.5, 0.5])
    experience, metrics = estimate_alone(scored(), OLD, REF, None, baselines, algorithm=algorithm, kl_coef=0.1)
    # the divergence of row 0 is 1.5 on token 1, that of row 1 is -1 on token 0
    expected = torch.tensor([[0.75 - 0.15, 0.75 - 0.15, 0.75], [-0.25 + 0.1] * 3, [0.0] * 3, [-1.0] * 3])[MASK]
    torch.testing.assert_close(experience.advantages, expected)
    assert not experience.returns.any()
    assert [metrics[f"critic/baselines/{name}"] for name in ("mean", "max", "min")] == [0.375, 0.5, 0.25]


def advantages_of(**keys: Any) -> torch.Tensor:
    experience, _ = estimate_alone(scored(), OLD, REF, None, algorithm=AlgorithmSection(**keys), kl_coef=None)
    return experience.advantages


@pytest.mark.parametrize(
    ("estimator", "per_sample"),  # two groups of two samples, scores 1, 0 and 0.5, -0.5, lengths 3, 1 and 2, 2
    [
        ("rloo", [1.0, -1.0, 1.0, -1.0]),
        ("gpg", [0.5, -0.5, 0.5, -0.5]),
        ("opo", [0.25, -0.75, 0.5, -0.5]),
        ("grpo_passk", [math.sqrt(2.0), 0.0, math.sqrt(2.0), 0.0]),
        ("none", [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_estimators_that_compare_responses(estimator: str, per_sample: list[float]) -> None:
    expected = torch.tensor(per_sample).repeat_interleave(LENGTHS)
    torch.testing.assert_close(advantages_of(adv_estimator=estimator), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "raw"),
    [
        ("reinforce_plus_plus", [[0.25, 0.5, 1.0], [0.0, 0.0, 0.0], [0.25, 0.5, 0.0], [-0.25, -0.5, 0.0]]),
        ("reinforce_plus_plus_baseline", [[0.5] * 3, [-0.5, 0.0, 0.0], [0.5, 0.5, 0.0], [-0.5, -0.5, 0.0]]),
    ],
)
def test_estimators_that_standardise_over_the_batch(estimator: str, raw: list[list[float]]) -> None:
    before = torch.tensor(raw)[MASK]
    found = advantages_of(adv_estimator=estimator, gamma=0.5)
    torch.testing.assert_close(found, (before - before.mean()) / before.std())


def test_overlong_penalty_lowers_reward_but_not_score() -> None:
    buffer = OverlongBufferSection(enable=True, len=2, penalty_factor=0.5, max_resp_len=3)
    algorithm = AlgorithmSection(adv_estimator="rloo", overlong_buffer=buffer)
    experience, metrics = estimate_alone(scored(), OLD, None, None, algorithm=algorithm, kl_coef=None)
    # 1 - 0.5 against 0; 0.25 and 0.25 less
    assert experience.advantages.tolist() == [*[0.5] * 3, -0.5, *[1.0] * 2, *[-1.0] * 2]
    assert (metrics["critic/score/max"], metrics["critic/rewards/max"]) == (1.0, 0.5)


def test_truncated_responses_count_in_group_but_are_masked() -> None:
    algorithm = AlgorithmSection(adv_estimator="rloo", mask_truncated_completions=True)
    experience, metrics = estimate_alone(scored(), OLD, REF, None, algorithm=algorithm, kl_coef=None)
    assert experience.num_tokens.tolist() == [0, 1, 2, 2]
    assert experience.mask.tolist() == [True] * 5
    assert experience.advantages.tolist() == [-1.0, *[1.0] * 2, *[-1.0] * 2]
    assert experience.old_log_probs is not None and torch.equal(experience.old_log_probs, OLD[3:])
    assert Totals.of(experience.num_learnt()) == Totals(num_tokens=5, num_sequences=3)
    assert metrics["response_length/max"] == 3.0


@pytest.mark.parametrize(
    ("keys", "factors", "metrics"),  # the engine found token 0 of sample 0 four times less likely, that of 1 twice more
    [
        (
            {"rollout_is": "token"},
            [[2.0, 1.0, 1.0], [0.5] * 3, [1.0] * 3, [1.0] * 3],
            {"rollout_is_mean": (2.0 + 0.5 + 6.0) / 8, "rollout_is_ratio_fraction_high": 1 / 8},
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
            [[3.0] * 3, [0.5] * 3, [1.0] * 3, [1.0] * 3],
            {"rollout_is_mean": (9.0 + 0.5 + 4.0) / 8, "rollout_is_ratio_fraction_high": 3 / 8},
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": 0.75},
            [[0.0, 1.0, 1.0], [0.0] * 3, [1.0] * 3, [1.0] * 3],
            {"rollout_is_mean": 6.0 / 8, "rollout_is_ratio_fraction_high": 1 / 8},
        ),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True},
            [[16 / 8.5, 8 / 8.5, 8 / 8.5], [4 / 8.5] * 3, [8 / 8.5] * 3, [8 / 8.5] * 3],
            {"rollout_is_mean": 8.5 / 8, "rollout_is_ratio_fraction_high": 1 / 8},
        ),
        (
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": 3.0,
                "rollout_is_batch_normalize": True,
                "rollout_rs": "token",
            },
            [[0.0, 3.0 / 1.375, 3.0 / 1.375], [0.5 / 1.375] * 3, [1.0 / 1.375] * 3, [1.0 / 1.375] * 3],
            {
                "rollout_is_mean": (9.0 + 0.5 + 4.0) / 8,
                "rollout_is_ratio_fraction_high": 3 / 8,
                "rollout_rs_masked_fraction": 1 / 8,
            },
        ),
        (
            {"rollout_rs": "token"},
            [[0.0, 1.0, 1.0], [1.0] * 3, [1.0] * 3, [1.0] * 3],  # one half is just within the bounds
            {"rollout_rs_masked_fraction": 1 / 8},
        ),
        (
            {"rollout_rs": "sequence", "rollout_rs_threshold": 8.0, "rollout_rs_threshold_lower": 0.75},
            [[1.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3],
            {"rollout_rs_masked_fraction": 1 / 8},
        ),
        (
            {"rollout_is": "token", "rollout_rs": "geometric", "rollout_rs_threshold": 1.25},
            [[0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3],
            {
                "rollout_is_mean": (2.0 + 0.5 + 6.0) / 8,
                "rollout_is_ratio_fraction_high": 1 / 8,
                "rollout_rs_masked_fraction": 4 / 8,
            },
        ),
    ],
)
def test_what_the_engine_saw_differently_is_corrected(
    keys: dict[str, Any], factors: list[list[float]], metrics: dict[str, float]
) -> None:
    rollout_log_probs = OLD.clone()
    rollout_log_probs[0] -= math.log(4.0)
    rollout_log_probs[3] += math.log(2.0) - 1e-6
    sampled = replace(scored(), rollout_log_probs=rollout_log_probs)
    algorithm = AlgorithmSection(adv_estimator="rloo", rollout_correction=RolloutCorrectionSection(**keys))
    experience, found = estimate_alone(sampled, OLD, None, None, algorithm=algorithm, kl_coef=None)
    plain = advantages_of(adv_estimator="rloo")
    torch.testing.assert_close(experience.advantages, plain)
    torch.testing.assert_close(experience.weights, torch.tensor(factors)[MASK])
    correction = {name: value for name, value in found.items() if name.startswith("rollout_corr/")}
    assert correction == pytest.approx({f"rollout_corr/{name}": value for name, value in metrics.items()}, rel=1e-5)
    assert found["critic/advantages/max"] == 1.0


@pytest.mark.parametrize("old", [OLD, None])
def test_ratios_from_the_engine_bypass_the_trainer(old: torch.Tensor | None) -> None:
    """`old` is None if the update's own pass computes the trainer's probabilities."""
    sampled = replace(scored(), rollout_log_probs=OLD - 0.5)
    algorithm = AlgorithmSection(adv_estimator="rloo", rollout_correction=RolloutCorrectionSection(bypass_mode=True))
    experience, _ = estimate_alone(sampled, old, None, None, algorithm=algorithm, kl_coef=None)
    assert torch.equal(experience.old_log_probs, OLD - 0.5)
    torch.testing.assert_close(experience.weights, MASK.float()[MASK])


def test_an_exact_divergence_is_taken_as_it_is() -> None:
    """Here every response has three tokens, and those outside MASK are an environment's."""
    exact = torch.tensor([[0.1, 0.2, 0.3], [0.4, math.nan, math.nan], [0.0, 0.5, math.nan], [0.0, 0.0, math.nan]])
    mask = MASK.flatten()
    responses, log_probs, values = (scored().rows(column).flatten() for column in (scored().responses, OLD, VALUES))
    sampled = replace(scored(), num_tokens=torch.full((4,), 3), mask=mask, responses=responses, rollout_log_probs=None)
    algorithm = AlgorithmSection(kl_penalty="full", gamma=0.5)
    experience, metrics = estimate_alone(
        sampled, log_probs, None, values, algorithm=algorithm, kl_coef=0.1, exact_kl=exact.flatten()
    )
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.2 + 0.4 + 0.25 + 0.0) / 4)
    assert experience.returns[2].item() == pytest.approx(1.0 - 0.03)  # Monte Carlo: lam = 1
    assert experience.returns[0].item() == pytest.approx(-0.01 + 0.5 * (-0.02 + 0.5 * 0.97))
    out_of_it, _ = estimate_alone(scored(), OLD, REF, VALUES, algorithm=algorithm, kl_coef=None)
    assert out_of_it.returns[2].item() == 1.0
