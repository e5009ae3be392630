"""Collects the samples of a step: its prompts, the responses to each prompt, and their scores.

A step usually takes one batch of prompts. Dynamic sampling (Yu et al. 2025, "DAPO", section 3.2) takes further batches
until it has a full batch of prompts whose responses differ in reward. ReMax (Li et al. 2024, algorithm 1) also draws
one greedy response to each prompt; its reward is the baseline of the other responses. The engine stays awake, with the
weights of one sync, until all samples are drawn.

Invariant: records are replicated, so every rank keeps the same prompts and stops after the same batch. The samples are
a pure function of the position in the data, the step and the actor's weights.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, assert_never

import torch
from torch import Tensor

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.shaping import scores_differ
from megarl.batch import Prompts, Rollouts, Scored, join
from megarl.data.order import Position
from megarl.rewards.scoring import first_failures
from megarl.tracking.timers import Timers
from megarl.training.estimate import response_rewards
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Scorer
from megarl.training.judge import Judge, require_scores


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The samples of one step."""

    scored: Scored
    baselines: Tensor | None  # [B] float32: the reward of the greedy response to a sample's prompt; None: not drawn
    position: Position  # of the next step in the data
    metrics: Metrics

    def judged(self) -> "Collected":
        """Return only the samples that have a score: the step learns from nothing else.

        No later code needs to know of the other samples. Their prompts stay, and with them the division into
        mini-batches.
        """
        has_score = self.scored.judged()
        return self if has_score.all() else self.select(has_score.nonzero()[:, 0])

    def select(self, samples: Tensor) -> "Collected":
        """Return only the given samples (int64 indices `[b]`) and their baselines, in that order."""
        baselines = None if self.baselines is None else self.baselines[samples]
        return replace(self, scored=self.scored.select(samples), baselines=baselines)


class SampleSource(Protocol):
    """A source of the samples of each step: an engine, or files."""

    def collect(self, position: Position, timers: Timers, *, step: int) -> Collected:
        """Return the samples of step `step` for the prompts from `position` on, the same on every rank."""


class Collector:
    """Draws samples as the algorithm needs them, and scores them."""

    def __init__(self, *, prompts: PromptSource, sampler: Sampler, scorer: Scorer, algorithm: AlgorithmSection) -> None:
        self._prompts, self._sampler, self._scorer, self._algorithm = prompts, sampler, scorer, algorithm

    def collect(self, position: Position, timers: Timers, *, step: int) -> Collected:
        """Return the samples of step `step` for the prompts from `position` on.

        Raises:
            ValueError: on all ranks alike, if dynamic sampling needs more batches than it may take.
        """
        judge = Judge(self._scorer)
        rollouts: Rollouts
        with timers("gen"), self._sampler.awake(timers, step=step) as sync_metrics:
            if self._algorithm.filter_groups.enable:
                rollouts, position, metrics = self._dynamic_samples(judge, position, timers, step=step)
            else:
                prompts, position = self._prompts.take(position)
                rollouts, metrics = self._sampler.generate(prompts, step=step), Metrics()
            greedy = None
            if self._algorithm.estimator.greedy:
                with timers("gen_max"):
                    greedy = self._sampler.greedy(Prompts(prompts=rollouts.prompts), step=step)
        with timers("reward"):
            scored = rollouts if isinstance(rollouts, Scored) else judge.score(rollouts)
            baselines = None
            if greedy is not None:
                baseline = judge.score(greedy)
                baselines, scored = self._rewards(baseline)[scored.groups], _without_baseline(scored, baseline)
        metrics |= judge.metrics() | sync_metrics
        return Collected(scored=scored, baselines=baselines, position=position, metrics=metrics)

    def _dynamic_samples(
        self, judge: Judge, position: Position, timers: Timers, *, step: int
    ) -> tuple[Scored, Position, Metrics]:
        """Return a batch of prompts whose responses differ in the metric of `filter_groups`, the first ones in order.

        Also return the position after the last batch that was taken, and metrics.
        """
        start, limit = position, self._algorithm.filter_groups.max_num_gen_batches
        kept, scores = list[Scored](), list[Tensor]()
        for number in count(1):
            prompts, position = self._prompts.take(position)
            rollouts = self._sampler.generate(prompts, step=step, batch=number - 1)
            with timers("reward", instead_of="gen"):
                scored = judge.score(rollouts)
            judged = scored.select(scored.judged().nonzero()[:, 0])
            differing = judged.groups[scores_differ(self._measure(judged), judged.groups)]
            kept.append(scored.of_prompts(differing.unique().tolist()))
            scores.append(judged.scores)
            wanted = len(prompts.prompts)
            if (num_kept := sum(len(part.prompts) for part in kept)) >= wanted:
                break
            fruitless = num_kept == 0 and position.epoch > start.epoch + 1  # a full epoch gave no prompt
            if number == limit or fruitless:
                raise ValueError(self._not_enough(num_kept, wanted, num_batches=number))
        metrics = {
            "train/num_gen_batches": float(len(kept)),
            "train/num_groups_kept": float(wanted),
            "train/num_groups_alike": float(len(kept) * wanted - num_kept),
            "train/num_groups_surplus": float(num_kept - wanted),
            "train/sampled_score/mean": float(torch.cat(scores).mean()),
        }
        return join(kept).of_prompts(range(wanted)), position, metrics

    def _measure(self, scored: Scored) -> Tensor:
        """Return the `[B]` metric in which the responses to a prompt must differ."""
        match self._algorithm.filter_groups.metric:
            case "acc":
                return scored.accuracies
            case "score":
                return scored.scores
            case "seq_reward" | "seq_final_reward":
                return self._rewards(scored)
            case unknown:
                assert_never(unknown)

    def _rewards(self, scored: Scored) -> Tensor:
        return response_rewards(scored, self._algorithm.overlong_buffer)

    def _not_enough(self, num_kept: int, wanted: int, *, num_batches: int) -> str:
        section = self._algorithm.filter_groups
        return (
            f"algorithm.filter_groups found only {num_kept} of {wanted} prompts whose responses differ in "
            f"{section.metric}, in {num_batches} batches (max_num_gen_batches={section.max_num_gen_batches}): the "
            "others are too easy or too hard for this actor. Choose other prompts, raise actor_rollout_ref.rollout.n "
            "or max_num_gen_batches (0 = no limit), or lower data.train_batch_size"
        )


def _without_baseline(scored: Scored, baseline: Scored) -> Scored:
    """Remove the scores of samples whose greedy response has no score. RewardError if most samples then have none."""
    if baseline.judged().all():
        return scored
    greedy, own = baseline.failures or (), scored.failures or [None] * len(scored)
    reasons = [failure and f"the greedy response to its prompt has no score: {failure}" for failure in greedy]
    failures = [failure or reasons[place] for failure, place in zip(own, scored.groups.tolist(), strict=True)]
    scored = replace(scored, failures=failures)
    require_scores(int(scored.judged().sum()), of=len(scored), failures=first_failures(scored))
    return scored
