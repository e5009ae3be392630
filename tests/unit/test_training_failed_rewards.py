"""A sample whose reward failed might as well never have been drawn: nothing that is learnt or measured shows it."""

import math
from dataclasses import fields, replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megarl.algorithms.config import (
    ESTIMATORS,
    LOSSES,
    AlgorithmSection,
    LossAggregation,
    OverlongBufferSection,
    PolicyLossSection,
    RolloutCorrectionSection,
)
from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Experience, Rewarded, Rollouts, Scored
from megarl.config.policy import ActorSection, CriticSection
from megarl.data.order import Position
from megarl.distributed.redistribution import redistribute
from megarl.distributed.sharded import Sharded
from megarl.training.collect import Collected
from megarl.training.minibatches import MiniBatches
from megarl.training.objectives import ActorObjective, CriticObjective
from tests.support.estimates import estimate_alone, mark_alone
from tests.support.records import alone, answer, prompts

NUM_PROMPTS, PER_PROMPT, NUM_TOKENS = 3, 3, 4
NUM_SAMPLES = NUM_PROMPTS * PER_PROMPT
BUILT_IN = [name for name in ESTIMATORS if name != "custom"]
LOSS_MODES = [name for name in LOSSES if name != "custom"]
AGG_MODES = get_args(LossAggregation)


def world(seed: int) -> tuple[Scored, dict[str, Tensor]]:
    """Samples of very different lengths, all with a score, and what models say of them, `[N]` or `[B]`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, NUM_TOKENS + 1, (NUM_SAMPLES,), generator=generator)
    lengths[seed % NUM_SAMPLES] = NUM_TOKENS
    rollouts: Rollouts = answer(prompts([2, 4, 3]), lengths.tolist())

    def noise() -> Tensor:
        return torch.randn(rollouts.mask.shape, generator=generator) * rollouts.mask

    says = {name: noise() for name in ("old", "ref", "values", "log_probs", "entropy", "kl", "new_values")}
    says["baselines"] = torch.rand(NUM_PROMPTS, generator=generator)[rollouts.groups]
    scores = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator) / 2
    rollouts = replace(rollouts, rollout_log_probs=says["old"] + 0.5 * noise(), truncated=lengths == NUM_TOKENS)
    return rollouts.extend(Scored, texts=[""] * NUM_SAMPLES, scores=scores, accuracies=scores), says


def failed(scored: Scored, samples: list[int]) -> Scored:
    """The record as the scorer gives it if the rewards of `samples` fail."""
    spoilt = scored.scores.clone()
    spoilt[samples] = math.nan
    failures = ["timeout" if sample in samples else None for sample in range(NUM_SAMPLES)]
    return replace(scored, scores=spoilt, accuracies=spoilt, failures=failures)


def never_drawn(scored: Scored, samples: list[int]) -> tuple[Scored, list[int], Tensor]:
    """The record of the other samples, put together field by field; and which samples and tokens these are."""
    others = [sample for sample in range(NUM_SAMPLES) if sample not in samples]

    def rest(value: Any) -> Any:
        if isinstance(value, Tensor):
            by_sample = value.split(1 if len(value) == NUM_SAMPLES else scored.num_tokens.tolist())
            return torch.cat([by_sample[sample] for sample in others])
        return [value[sample] for sample in others]

    per_sample = [field.name for field in fields(scored) if field.name != "prompts"]
    values = {name: getattr(scored, name) for name in per_sample}
    record = replace(scored, **{name: rest(value) for name, value in values.items() if value is not None})
    return record, others, rest(torch.arange(len(scored.mask)))


def learn(
    scored: Sharded[Scored],
    baselines: Tensor | None,
    tokens: Tensor,
    says: dict[str, Tensor],
    algorithm: AlgorithmSection,
    actor: ActorSection,
) -> list[Any]:
    """Metrics of the estimate; then loss, metrics and gradients of each mini-batch that has a sample.

    Token `i` of `scored` is token `tokens[i]` of `says`. Gradients are those of all tokens.
    """
    found: list[Any] = []
    rewarded = redistribute(scored, Rewarded, scored.index.runs, scored.shares).share
    experience, metrics = estimate_alone(
        replace(rewarded, responses=tokens),
        says["old"][tokens],
        says["ref"][tokens],
        says["values"][tokens],
        baselines,
        algorithm=algorithm,
        kl_coef=0.1,
    )
    found.append(metrics)
    cut = MiniBatches(num_prompts=2, num_epochs=1, shuffle=True, seed=3)
    for samples in cut.members(experience.groups, len(experience.prompts), step=0):
        batch = experience.select(samples)
        if not batch.mask.any():
            continue
        leaves = {name: says[name].clone().requires_grad_() for name in ("log_probs", "entropy", "kl", "new_values")}
        of = {name: leaf[batch.responses] for name, leaf in leaves.items()}
        totals = Totals.of(batch.num_learnt())
        outputs = PolicyOutputs(log_probs=of["log_probs"], entropy=of["entropy"], kl=of["kl"])
        marked: Experience = mark_alone(batch, actor)
        loss, of_actor = ActorObjective(actor, horizon=NUM_TOKENS)(outputs, marked, totals)
        critic = CriticObjective(CriticSection(loss_agg_mode=actor.loss_agg_mode), horizon=NUM_TOKENS)
        value_loss, of_critic = critic(of["new_values"], batch, totals)
        (loss + value_loss).backward()
        numbers = {name: float(value) for name, value in (of_actor | of_critic).items()}
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
        found.append([loss.item(), value_loss.item(), numbers, *gradients])
    return found


def assert_equal(one: Any, other: Any) -> None:
    """Bit for bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list):
        for ours, theirs in zip(one, other, strict=True):
            assert_equal(ours, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("estimator", BUILT_IN)
def test_failed_reward_sample_changes_nothing_in_training(estimator: Any) -> None:
    """Every estimator with every loss and every way to sum it up; in every other case with all that may be added."""
    for seed, (loss_mode, agg_mode) in enumerate(product(LOSS_MODES, AGG_MODES)):
        scored, says = world(seed)
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed))
        samples = order[: 1 + seed % (NUM_SAMPLES - 1)].tolist()
        options = bool(seed % 2)
        algorithm = AlgorithmSection(
            adv_estimator=estimator,
            mask_truncated_completions=options,
            overlong_buffer=OverlongBufferSection(enable=options, len=2, max_resp_len=NUM_TOKENS),
            rollout_correction=RolloutCorrectionSection(
                rollout_is="token" if options else None, rollout_rs="sequence" if options else None
            ),
        )
        actor = ActorSection(
            loss_agg_mode=agg_mode,
            entropy_coeff=0.1,
            use_kl_loss=True,
            kl_loss_type="full" if options else "low_var_kl",
            policy_loss=PolicyLossSection(loss_mode=loss_mode, clip_cov_ratio=0.5, clip_cov_lb=-9.0, clip_cov_ub=9.0),
        )
        baselines = says["baselines"] if estimator == "remax" else None
        collected = Collected(
            scored=alone(failed(scored, samples)), baselines=baselines, position=Position(), metrics={}
        )
        kept = collected.scored_only()
        others, rows, tokens = never_drawn(scored, samples)
        of_others = None if baselines is None else baselines[rows]
        found = learn(kept.scored, kept.baselines, tokens, says, algorithm, actor)
        assert_equal(found, learn(alone(others), of_others, tokens, says, algorithm, actor))
        for _, _, numbers, *gradients in found[1:]:
            assert all(map(math.isfinite, numbers.values()))
            assert not any(gradient.index_fill(0, tokens, 0.0).any() for gradient in gradients)
