"""Collects the samples of a step: its prompts, the responses to each prompt, and their scores.

A step usually takes one batch of prompts. Dynamic sampling takes further prompts until it has a full batch of prompts
whose responses differ in reward. ReMax (Li et al. 2024, algorithm 1) also draws one greedy response to each prompt; its
reward is the baseline of the other responses. The engine stays awake, with the weights of one sync, until all samples
are drawn.

Invariant: every rank has the same index of the samples, so every rank keeps the same prompts and stops after the same
engine step. The samples are a pure function of the position in the data, the step and the actor's weights.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

import torch
from torch import Tensor

from megarl.algorithms.config import AlgorithmSection
from megarl.batch import Group, Prompts, Rollouts, Scored
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded
from megarl.rewards.scoring import first_failures
from megarl.samples.in_flight import NOTHING, InFlight
from megarl.tracking.timers import Timers
from megarl.training.dynamic import Queue, draw_differing
from megarl.training.estimate import response_rewards
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Scorer
from megarl.training.partial import Partial, draw_enough, staleness
from megarl.training.score_accumulator import ScoreAccumulator, require_scores


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The samples of one step."""

    scored: Sharded[Scored]
    baselines: Tensor | None  # [B] float32: the reward of the greedy response to a sample's prompt; None: not drawn
    position: Position  # of the next step in the data
    metrics: Metrics
    in_flight: InFlight = NOTHING

    def scored_only(self) -> "Collected":
        """Return only the samples that have a score: the step learns from nothing else.

        No later code needs to know of the other samples. Their prompts stay, and with them the division into
        mini-batches.
        """
        scored = self.scored
        has_score = scored.share.has_score()
        if int(scored.sum(has_score)) == len(scored):
            return self
        return self.select(scored.marked(has_score).nonzero()[:, 0])

    def select(self, samples: Tensor) -> "Collected":
        """Return only the given samples (int64 indices `[b]`) and their baselines, in that order."""
        baselines = None if self.baselines is None else self.baselines[samples]
        return replace(self, scored=self.scored.select(samples), baselines=baselines)


class SampleSource(Protocol):
    """A source of the samples of each step: an engine, or files."""

    def collect(self, position: Position, timers: Timers, *, step: int, in_flight: InFlight = NOTHING) -> Collected:
        """Return the samples of step `step` for the prompts from `position` on, the same on every rank.

        `in_flight` are the groups that the step before left to this step.
        """


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Draws samples as the algorithm needs them, and scores them."""

    prompts: PromptSource
    sampler: Sampler
    scorer: Scorer
    algorithm: AlgorithmSection
    partial: Partial | None = None  # None: every step draws its samples to their end

    def collect(self, position: Position, timers: Timers, *, step: int, in_flight: InFlight = NOTHING) -> Collected:
        """Return the samples of step `step` for the prompts from `position` on, and of `in_flight` groups.

        Raises:
            UserError: on all ranks alike, if dynamic sampling needs more batches than it may take.
        """
        scores = ScoreAccumulator(self.scorer)
        rollouts: Sharded[Rollouts]
        scored: Sharded[Scored] | None = None
        left = NOTHING
        with timers("gen"), self.sampler.awake(timers, step=step) as sync_metrics:
            if self.algorithm.filter_groups.enable:
                scored, position, metrics = self._dynamic_samples(scores, position, timers, step=step)
                rollouts = scored
            elif self.partial:
                sampled = draw_enough(self.partial, self.prompts, self.sampler, in_flight.groups, position, step=step)
                rollouts = self.sampler.record(sampled.chosen)
                position = sampled.position
                left = InFlight(sampled.in_flight, rollouts.shares)
                metrics = sampled.metrics | staleness(rollouts, step=step)
            else:
                prompts, position = self.prompts.take(position)
                rollouts, metrics = self.sampler.generate(prompts, step=step)
            greedy = None
            if self.algorithm.estimator.greedy:
                with timers("gen_max"):
                    greedy = self.sampler.greedy(Prompts(prompts=rollouts.index.prompts), step=step)
        with timers("reward"):
            scored = scored or scores.score(rollouts)
            baselines = None
            if greedy is not None:
                baseline = scores.score(greedy)
                baselines = self._rewards(baseline)[scored.index.groups]
                scored = _without_baseline(scored, baseline)
        metrics |= scores.metrics() | sync_metrics
        return Collected(scored=scored, baselines=baselines, position=position, metrics=metrics, in_flight=left)

    def _dynamic_samples(
        self, scores: ScoreAccumulator, position: Position, timers: Timers, *, step: int
    ) -> tuple[Sharded[Scored], Position, Metrics]:
        """Return a batch of prompts whose responses differ, the position after it, and metrics."""
        queue = Queue(self.prompts, self.sampler, position, step=step)

        def score(groups: list[Group]) -> Sharded[Scored]:
            rollouts = self.sampler.record(groups)
            with timers("reward", instead_of="gen"):
                return scores.score(rollouts, least=queue.batch_size * len(groups[0].samples))

        session = self.sampler.open(step=step)
        sampled = draw_differing(session, queue, score, self._measure, self.algorithm.filter_groups)
        self.scorer.forget()
        return sampled

    def _measure(self, scored: Sharded[Scored]) -> Tensor:
        """Return the `[B]` metric in which the responses to a prompt must differ. Collective."""
        match self.algorithm.filter_groups.metric:
            case "acc":
                return scored.gather(scored.share.accuracies).to(torch.float32)
            case "score":
                return scored.gather(scored.share.scores).to(torch.float32)
            case "seq_reward" | "seq_final_reward":
                return self._rewards(scored)
            case unknown:
                assert_never(unknown)

    def _rewards(self, scored: Sharded[Scored]) -> Tensor:
        """Return `[B]` float32 of all samples. Collective."""
        return scored.gather(response_rewards(scored.share, self.algorithm.overlong_buffer)).to(torch.float32)


def _without_baseline(scored: Sharded[Scored], baseline: Sharded[Scored]) -> Sharded[Scored]:
    """Remove the scores of samples whose greedy response has no score. Collective.

    Raises:
        RewardError: most samples then have none.
    """
    failures = baseline.share.failures or ()
    found = {place: failure for place, failure in enumerate(failures) if failure is not None}
    greedy = baseline.first(len(baseline), found)  # by prompt: a prompt has one greedy response
    if not greedy:
        return scored
    share = scored.share
    own = share.failures or [None] * len(share)
    reasons = {place: f"the greedy response to its prompt has no score: {why}" for place, why in greedy.items()}
    failures = [failure or reasons.get(place) for failure, place in zip(own, share.groups.tolist(), strict=True)]
    is_lost = torch.tensor([failure is not None for failure in failures], dtype=torch.bool)
    numbers = {name: getattr(share, name).masked_fill(is_lost, math.nan) for name in ("scores", "accuracies")}
    scored = scored.with_share(replace(share, failures=failures, **numbers))
    num_scored = int(scored.sum(scored.share.has_score()))
    require_scores(num_scored, of=len(scored), failures=first_failures(scored))
    return scored
