"""The samples an iteration learns from: which prompts, how many answers to each, and how good they are.

Usually one batch of prompts. Dynamic sampling (Yu et al. 2025, "DAPO", section 3.2) takes batch after batch until there
are as many prompts as one batch has whose answers the reward tells apart. ReMax (Li et al. 2024, algorithm 1) draws one
greedy answer more, whose reward is the baseline of the others. The engine stays awake, with the weights of one sync,
until all of this is there.

Invariant: records are replicated, so every rank keeps the same prompts and stops after the same batch; and what is
taken is a pure function of the position in the data, the step and the actor's weights.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, assert_never

import torch
from torch import Tensor

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.shaping import tells_apart
from megarl.batch import Prompts, Rollouts, Scored, join
from megarl.data.order import Position
from megarl.rewards.scoring import first_failures
from megarl.tracking.timers import Timers
from megarl.training.estimate import response_rewards
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Scorer
from megarl.training.judge import Judge, require_scores


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What one iteration has to learn from."""

    scored: Scored
    baselines: Tensor | None  # [B] float32: the reward of the greedy answer to a sample's prompt; None: none was drawn
    position: Position  # where the next iteration goes on in the data
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
    """Where an iteration gets its samples from."""

    def collect(self, position: Position, timers: Timers, *, step: int) -> Collected:
        """The samples of iteration `step`, of prompts from `position` on; the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Draws samples as the algorithm wants them, and has them scored."""

    prompts: PromptSource
    sampler: Sampler
    scorer: Scorer
    algorithm: AlgorithmSection

    def collect(self, position: Position, timers: Timers, *, step: int) -> Collected:
        """The samples of iteration `step`, of prompts from `position` on.

        Raises:
            ValueError: on all ranks alike, where the batches that dynamic sampling may take were not enough.
        """
        judge = Judge(self.scorer)
        rollouts: Rollouts
        with timers("gen"), self.sampler.awake(timers, step=step) as sync_metrics:
            if self.algorithm.filter_groups.enable:
                rollouts, position, metrics = self._told_apart(judge, position, timers, step=step)
            else:
                prompts, position = self.prompts.take(position)
                rollouts, metrics = self.sampler.generate(prompts, step=step), Metrics()
            greedy = None
            if self.algorithm.estimator.greedy:
                with timers("gen_max"):
                    greedy = self.sampler.greedy(Prompts(prompts=rollouts.prompts), step=step)
        with timers("reward"):
            scored = rollouts if isinstance(rollouts, Scored) else judge.score(rollouts)
            baselines = None
            if greedy is not None:
                baseline = judge.score(greedy)
                baselines, scored = self._rewards(baseline)[scored.groups], _without_baseline(scored, baseline)
        metrics |= judge.metrics() | sync_metrics
        return Collected(scored=scored, baselines=baselines, position=position, metrics=metrics)

    def _told_apart(
        self, judge: Judge, position: Position, timers: Timers, *, step: int
    ) -> tuple[Scored, Position, Metrics]:
        """As many prompts as one batch has whose answers differ in the metric of `filter_groups`: the first in order.

        And where the data goes on, which is after the last batch that was taken.
        """
        start, limit = position, self.algorithm.filter_groups.max_num_gen_batches
        kept, scores = list[Scored](), list[Tensor]()
        for number in count(1):
            prompts, position = self.prompts.take(position)
            rollouts = self.sampler.generate(prompts, step=step, batch=number - 1)
            with timers("reward", instead_of="gen"):
                scored = judge.score(rollouts)
            judged = scored.select(scored.judged().nonzero()[:, 0])
            apart = judged.groups[tells_apart(self._measure(judged), judged.groups)]
            kept.append(scored.of_prompts(apart.unique().tolist()))
            scores.append(judged.scores)
            wanted = len(prompts.prompts)
            if (num_kept := sum(len(part.prompts) for part in kept)) >= wanted:
                break
            fruitless = num_kept == 0 and position.epoch > start.epoch + 1  # in a whole epoch
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
        """[B] what the answers to a prompt must differ in."""
        match self.algorithm.filter_groups.metric:
            case "acc":
                return scored.accuracies
            case "score":
                return scored.scores
            case "seq_reward" | "seq_final_reward":
                return self._rewards(scored)
            case unknown:
                assert_never(unknown)

    def _rewards(self, scored: Scored) -> Tensor:
        return response_rewards(scored, self.algorithm.overlong_buffer)

    def _not_enough(self, num_kept: int, wanted: int, *, num_batches: int) -> str:
        section = self.algorithm.filter_groups
        return (
            f"algorithm.filter_groups found {num_kept} of {wanted} prompts whose answers differ in {section.metric} in "
            f"{num_batches} batches (max_num_gen_batches={section.max_num_gen_batches}): the others are too easy or "
            "too hard for this actor. Choose other prompts, raise actor_rollout_ref.rollout.n or max_num_gen_batches "
            "(0 = no limit), or lower data.train_batch_size"
        )


def _without_baseline(scored: Scored, baseline: Scored) -> Scored:
    """The samples, without a score if the greedy response to their prompt has none. RewardError if most have none."""
    if baseline.judged().all():
        return scored
    greedy, own = baseline.failures or (), scored.failures or [None] * len(scored)
    reasons = [failure and f"the greedy response to its prompt has no score: {failure}" for failure in greedy]
    failures = [failure or reasons[place] for failure, place in zip(own, scored.groups.tolist(), strict=True)]
    scored = replace(scored, failures=failures)
    require_scores(int(scored.judged().sum()), of=len(scored), failures=first_failures(scored))
    return scored
