"""The loop's nouns, built from learners and engines: `Model` for actor, reference and critic, and the sampler."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Generation, Group, Prompt, Prompts, Rewarded, Rollouts
from megarl.data.translation import Translation
from megarl.distributed.exchange import on_each_rank
from megarl.distributed.redistribution import redistribute
from megarl.distributed.routes import redistribute_routes
from megarl.distributed.sharded import Sharded
from megarl.environments.episodes import Environments
from megarl.learner.batching import Budget
from megarl.learner.forward import ReferenceDivergence
from megarl.learner.learner import Learner, ReducedGradient
from megarl.learner.per_data_source import PerDataSource
from megarl.learner.terms import LossTerm, Objective
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.responses import of_groups
from megarl.rollout.sampling import GREEDY, Sampling
from megarl.rollout.session import SamplingSession
from megarl.rollout.table import GroupRows
from megarl.samples.step_cache import StepCache
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Metrics
from megarl.training.minibatches import MiniBatches
from megarl.training.ptx import Supervision
from megarl.training.skips import Skips
from megarl.training.updates import update
from megarl.weight_sync.transfer import Sync

Outputs = TypeVar("Outputs", PolicyOutputs, Tensor)
R = TypeVar("R", bound=Rollouts)


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How a model learns from the experience of a step."""

    objective: Objective
    budget: Budget
    minibatches: MiniBatches
    prepare: Callable[[Sharded[Experience]], Sharded[Experience]] | None = None  # applied to each mini-batch
    against: ReferenceDivergence | None = None  # the exact divergence that the objective uses
    supervision: Supervision | None = None  # a further term of the loss of each mini-batch
    skips: Skips | None = None  # handles mini-batches with a loss or gradient that is not finite; None: nothing does


@dataclass(frozen=True, kw_only=True)
class Model(Generic[Outputs]):
    """Actor, reference or critic: a learner with the budgets and the objective of its role."""

    name: str  # in metrics and checkpoints
    learner: Learner
    budget: Budget  # the size of a forward pass in `infer`
    updates: Updates | None = None  # None: the model never learns
    against: ReferenceDivergence | None = None  # the exact divergence that `infer` reports
    with_entropy: bool = False  # whether `infer` reports entropies
    translate: Translation | None = None  # into the model's tokens; None: it reads the policy's
    keeps_routes: bool = False  # updates give tokens to the experts that were chosen before them
    reads_everywhere: bool = False  # all ranks take all tokens: a model translates them, or hashes them for dropout

    def take(self, samples: Sharded[Rewarded], *, step: int) -> Sharded[Rewarded]:
        """Bring the samples of a step to the ranks that learn from them, as far as their stages read them. Collective.

        The samples of each mini-batch of the first epoch are spread evenly.
        """
        minibatches = self._updates_of_role().minibatches
        index = samples.index
        runs = index.runs
        owners = torch.zeros_like(runs.owners)
        num_minibatches = -(-len(index.prompts) // minibatches.num_prompts)
        of_step = minibatches.members(runs.groups, len(index.prompts), step=step)
        for chosen in islice(of_step, num_minibatches):  # D442
            owners[chosen] = self.learner.batching.owners(
                index.run_lengths[chosen], runs.groups[chosen], runs.counts[chosen]
            )
        runs = runs.owned_by(owners)
        mesh = self.learner.mesh
        taken = redistribute(samples, Rewarded, runs, mesh.shares if self.reads_everywhere else mesh.stage_shares)
        if samples.share.routes is None:
            return taken
        routes = redistribute_routes(samples, runs, self.learner.holders)
        return taken.with_share(replace(taken.share, routes=routes))

    def infer(self, batch: Sharded[Rollouts]) -> Outputs:
        """Return the model's outputs for the response tokens of this rank's share, `[N]` float32."""
        batch, budget = self._as_read(batch, self.budget)
        outputs: Outputs = self.learner.infer(batch, budget, against=self.against, with_entropy=self.with_entropy)
        return outputs

    def infer_first(self, samples: Sharded[R]) -> tuple[Outputs, Sharded[R]]:
        """Return the outputs before the update, and the samples with the experts that this pass chose, if these stay.

        The updates of the step then give each token to these experts (R2).
        """
        if not self.keeps_routes:
            return self.infer(samples), samples
        outputs, routes = self.learner.infer_with_routes(samples, self.budget, against=self.against)
        return outputs, samples.with_share(replace(samples.share, routes=routes))

    def forward_backward(self, experience: Sharded[Experience], *, step: int) -> ReducedGradient:
        """Compute the gradient of a step, counted from 0, that has one mini-batch, and the model's outputs on it."""
        experience, budget = self._as_read(experience, self._updates_of_role().budget)
        (terms,) = self._minibatches(experience, step)
        return self.learner.forward_backward(terms, budget, with_outputs=True)

    def update(self, experience: Sharded[Experience], *, step: int, gradient: ReducedGradient | None = None) -> Metrics:
        """Learn from the experience of a step, counted from 0. The learner's own metrics get the prefix `NAME/`.

        `gradient` is that of the step's one mini-batch, if `forward_backward` has computed it.

        Raises:
            UserError: on all ranks alike, if too many updates in a row were skipped.
        """
        updates = self._updates_of_role()
        experience, budget = self._as_read(experience, updates.budget)
        metrics = update(
            self.learner,
            self._minibatches(experience, step),
            budget,
            skips=updates.skips,
            step=step,
            gradient=gradient,
        )
        return {key if "/" in key else f"{self.name}/{key}": value for key, value in metrics.items()}

    def _updates_of_role(self) -> Updates:
        assert self.updates is not None, f"the {self.name} does not learn"
        return self.updates

    def _minibatches(self, experience: Sharded[Experience], step: int) -> Iterator[Sequence[LossTerm]]:
        """Yield the terms of the loss of each mini-batch of a step."""
        updates = self._updates_of_role()
        extra_terms = updates.supervision.terms(self.learner, step) if updates.supervision else None
        for batch in updates.minibatches.of(experience, step=step):
            whole = updates.prepare(batch) if updates.prepare else batch
            term = LossTerm(batch=whole, objective=updates.objective, against=updates.against)
            yield [term, next(extra_terms)] if extra_terms else [term]

    def _as_read(self, batch: Sharded[R], budget: Budget) -> tuple[Sharded[R], Budget]:
        """Re-encode the batch in the model's own tokens. The budget grows if a sequence becomes longer than it."""
        translate = self.translate
        if translate is None:
            return batch, budget
        share = on_each_rank(lambda: translate(batch.share))
        lengths = batch.gather(share.lengths()).to(torch.int64)
        index = replace(batch.index, read_lengths=lengths)
        return replace(batch, share=share, index=index), budget.holding(int(lengths.max()), self.learner.mesh)


@dataclass(frozen=True)
class FrozenPolicies:
    """The frozen policies. Each reads the samples of its data sources, and all of them together act as one."""

    models: PerDataSource[Model[PolicyOutputs]]

    def infer(self, batch: Sharded[Rollouts]) -> PolicyOutputs:
        """Return the log-probabilities of the response tokens of this rank's share, `[N]` float32."""
        shares = self.models.shares(batch.index)
        if len(shares) == 1:
            [(model, _)] = shares
            return PolicyOutputs(log_probs=model.infer(batch).log_probs)
        read = [model.infer(batch.select(samples)).log_probs for model, samples in shares]
        order = torch.cat([samples for _, samples in shares])
        log_probs = batch.select(order).tokens_of(order.argsort(), torch.cat(read))
        return PolicyOutputs(log_probs=log_probs)

    def against(self, divergence: Divergence) -> ReferenceDivergence:
        """Return the divergence from these policies."""
        return ReferenceDivergence(policies=self.models.map(lambda model: model.learner.forward), divergence=divergence)


@dataclass(frozen=True, kw_only=True)
class EngineSampler:
    """The engine replicas together. Each replica takes a share of the prompts; its ranks have its responses."""

    engine: RolloutEngine
    sync: Sync
    section: RolloutSection  # the sampling parameters
    finished: Callable[[Prompt, Sequence[int]], None]  # called for each response, on one rank, at once
    environments: Environments | None = None  # samples are episodes, whose turns go to these instead
    step_cache: StepCache | None = None  # keeps the complete responses of a step until the next step

    def awake(self, timers: Timers, *, step: int) -> AbstractContextManager[Metrics]:
        """Wake the engine with the actor's weights, as `Sync.awake` does."""
        return self.sync.awake(timers, step=step)

    def open(self, *, step: int, keeps_stopped: bool = False) -> SamplingSession:
        """Return a session that draws training samples, and keeps the tokens of stopped samples if so asked."""
        return self._session(self.section, step=step, final_only=not keeps_stopped, with_routes=True)

    def record(self, groups: Sequence[Group]) -> Sharded[Rollouts]:
        """Return the record of complete groups of training samples."""
        return of_groups(groups, self.engine.shares, self.engine.no_routes)

    def groups(self, prompts: Prompts, *, step: int, batch: int = 0) -> Sequence[Group]:
        """Return new groups of training samples. A later `batch` has other samples of the same prompt."""
        first = batch * self.section.n
        numbers = range(first, first + self.section.n)
        return GroupRows.new(self._opened(prompts).prompts, numbers, started=step)

    def generate(self, prompts: Prompts, *, step: int) -> tuple[Sharded[Rollouts], Metrics]:
        """Draw the training samples of a step."""
        session = self.open(step=step)
        groups = self.groups(prompts, step=step)
        complete: Sequence[Group]
        if self.step_cache:
            complete = _finish_and_keep(session, groups, self.step_cache, step=step)
        else:
            complete = session.draw(groups)
        return self.record(complete), {"rollout/occupancy": session.occupancy()}

    def greedy(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        """Generate one response to each prompt from the likeliest tokens."""
        return self._rollouts(prompts, GREEDY, step=step)

    def validate(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        """Draw samples with the parameters of `val_kwargs`."""
        return self._rollouts(prompts, self.section.val_kwargs, step=step)

    def _rollouts(self, prompts: Prompts, sampling: Sampling, *, step: int) -> Sharded[Rollouts]:
        opened = self._opened(prompts)
        groups = GroupRows.new(opened.prompts, range(sampling.n), started=step)
        return of_groups(self._session(sampling, step=step).draw(groups), self.engine.shares)

    def _session(
        self, sampling: Sampling, *, step: int, final_only: bool = True, with_routes: bool = False
    ) -> SamplingSession:
        max_tokens = self.section.response_length
        episodes = None
        if self.environments:
            episodes = self.environments.begin(max_tokens=max_tokens, group=self.engine.host_group)
        queue = self.engine.open_queue(
            sampling,
            max_tokens=max_tokens,
            step=step,
            on_finished=episodes.ask if episodes else self._on_finished,
            final_only=final_only,
            with_routes=with_routes,
        )
        return SamplingSession(self.engine, queue, num_slots=self.section.max_num_seqs, episodes=episodes)

    def _opened(self, prompts: Prompts) -> Prompts:
        """Return the prompts as the environment makes them."""
        if self.environments is None:
            return prompts
        return self.environments.open(prompts, max_tokens=self.section.prompt_length)

    def _on_finished(self, prompt: Prompt, response: Generation) -> None:
        self.finished(prompt, response.token_ids)


def _finish_and_keep(
    session: SamplingSession, groups: Sequence[Group], step_cache: StepCache, *, step: int
) -> Sequence[Group]:
    """Draw all samples of the groups, except those that an earlier job has kept. Keep the others as they complete."""
    complete = step_cache.begin(step, groups)
    if not complete:
        return session.draw(groups, step_cache.write)
    session.add({number: group for number, group in enumerate(groups) if number not in complete})
    while session.num_open:
        sampled = session.advance()
        step_cache.write(sampled)
        complete |= sampled
    return [complete[number] for number in range(len(groups))]
