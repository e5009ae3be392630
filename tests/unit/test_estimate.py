import math

import pytest
import torch

from megarl.algorithms.advantages import grpo
from megarl.algorithms.config import AlgorithmSection
from megarl.batch import Prompt, Scored
from megarl.estimate import estimate, mismatch_metrics

MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [True, True, False]])
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0], [-1.0, -3.0, 0.0], [-0.5, -0.5, 0.0]])
REF = torch.tensor([[-1.0, -2.5, -1.0], [-1.0, 0.0, 0.0], [-1.0, -3.0, 0.0], [-0.5, -0.5, 0.0]])
VALUES = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.0, 0.0], [0.2, 0.3, 0.0], [0.0, 1.0, 0.0]])


def scored() -> Scored:
    prompts = [
        Prompt(index=i, token_ids=[1] * length, text="", data_source="", ground_truth=None, extra_info={})
        for i, length in enumerate([3, 5])
    ]
    return Scored(
        prompts=prompts,
        groups=torch.tensor([0, 0, 1, 1]),
        responses=torch.zeros(4, 3, dtype=torch.int64),
        mask=MASK,
        rollout_log_probs=OLD,
        truncated=torch.tensor([True, False, False, False]),
        texts=[""] * 4,
        scores=torch.tensor([1.0, 0.0, 0.5, -0.5]),
    )


def test_ppo_estimates_from_rewards_less_the_divergence() -> None:
    experience, metrics = estimate(scored(), OLD, REF, VALUES, algorithm=AlgorithmSection(), kl_coef=0.1)
    # kl: row 0 has 1.5 on token 1, row 1 has -1 on token 0; gamma = lam = 1: returns are rewards to go
    expected = torch.tensor([[0.85, 0.85, 1.0], [0.1, 0.0, 0.0], [0.5, 0.5, 0.0], [-0.5, -0.5, 0.0]])
    torch.testing.assert_close(experience.returns, expected)
    raw = (expected - VALUES)[MASK]
    torch.testing.assert_close(experience.advantages[MASK], (raw - raw.mean()) / raw.std())
    assert not experience.advantages[~MASK].any()
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
            "critic/vf_explained_var": 1.0 - float(raw.var() / (expected[MASK].var() + 1e-5)),
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
    experience, metrics = estimate(scored(), OLD, None, None, algorithm=algorithm, kl_coef=None)
    assert experience.advantages[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert torch.equal(experience.ref_log_probs, OLD)
    assert not experience.values.any()
    assert not experience.returns.any()
    assert not [name for name in metrics if "kl" in name or "values" in name or "vf_" in name]


def test_grpo_takes_the_divergence_from_the_reward_where_asked() -> None:
    algorithm = AlgorithmSection(adv_estimator="grpo")
    experience, _ = estimate(scored(), OLD, REF, None, algorithm=algorithm, kl_coef=0.1)
    rewards = torch.tensor([1.0 - 0.15, 0.1, 0.5, -0.5])
    torch.testing.assert_close(
        experience.advantages, grpo(rewards, torch.tensor([0, 0, 1, 1]), MASK, normalize_by_std=True)
    )


def test_mismatch_compares_probabilities_of_real_tokens() -> None:
    trainer = torch.log(torch.tensor([[0.5, 0.2, 0.9]]))
    engine = torch.log(torch.tensor([[0.4, 0.2, 0.1]]))
    metrics = mismatch_metrics(trainer, engine, torch.tensor([[True, True, False]]))
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_mean": 0.05,
            "training/rollout_probs_diff_std": 0.05 * math.sqrt(2.0),
        },
        rel=1e-5,
    )
