"""A role prepares the data for its learner, which here only records them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megarl.algorithms.config import PolicyLossSection
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Marked, Prompts, Rewarded, Rollouts
from megarl.config.policy import ActorSection
from megarl.distributed.sharded import Sharded
from megarl.learner.batching import Budget
from megarl.learner.finite import GradientStatus
from megarl.learner.per_data_source import PerDataSource
from megarl.learner.terms import LossTerm
from megarl.training.marks import mark
from megarl.training.minibatches import MiniBatches
from megarl.training.objectives import SFTObjective
from megarl.training.ptx import Supervision
from megarl.training.roles import FrozenPolicies, Model, Updates
from tests.support.records import alone, answer, prompts

BUDGET = Budget(max_tokens=64, max_sequences=None)


class Optimizer:
    lr = 0.5

    def advance_schedule(self) -> None:
        pass


class Learner:
    """Records the terms of each mini-batch."""

    def __init__(self) -> None:
        self.optimizer = Optimizer()
        self.minibatches: list[Any] = []
        self.extra_terms: list[LossTerm] = []

    def spread(self, pairs: Any) -> Any:
        return pairs

    def learning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_backward(self, terms: Sequence[LossTerm], budget: Budget, *, with_outputs: bool = False) -> Any:
        first, *others = terms
        self.minibatches.append(first.batch)
        self.extra_terms += others
        return SimpleNamespace(status=GradientStatus.LEARN, metrics={"actor/pg_loss": 1.0}, norm=2.0)

    def optim_step(self, gradient: Any) -> None:
        pass


def experience() -> Experience:
    """Two prompts with two responses each; of either prompt, the last token of the second response stands out."""
    rollouts = answer(prompts([4, 6]), [2, 2, 2, 2])
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0] * 2)
    log_probs = torch.tensor([-2.0, -2.0, -2.0, -1.0] * 2)
    zeros = torch.zeros(8)
    return rollouts.extend(Rewarded, scores=torch.zeros(4)).extend(
        Experience,
        old_log_probs=log_probs,
        ref_log_probs=log_probs,
        values=zeros,
        advantages=advantages,
        weights=torch.ones(8),
        returns=zeros,
    )


def test_every_mini_batch_is_prepared_whole() -> None:
    learner = Learner()
    section = ActorSection(policy_loss=PolicyLossSection(loss_mode="kl_cov", kl_cov_ratio=0.25))
    updates = Updates(
        objective=None,
        budget=BUDGET,
        minibatches=MiniBatches(num_prompts=1, num_epochs=2, shuffle=True, seed=0),
        prepare=partial(mark, settings=section.policy_loss),
    )
    actor = Model(name="actor", learner=learner, budget=BUDGET, updates=updates)  # type: ignore[arg-type, var-annotated]
    metrics = actor.update(alone(experience()), step=0)
    assert {"actor/lr": 0.5, "actor/pg_loss": 1.0, "actor/grad_norm": 2.0}.items() <= metrics.items()
    assert len(learner.minibatches) == 4
    for minibatch in learner.minibatches:
        assert isinstance(minibatch.share, Marked)
        assert minibatch.share.marked.tolist() == [False, False, False, True]


class Pairs:
    """Gives the number that it is asked for in place of a batch."""

    def take(self, step: int) -> int:
        return step


def test_supervised_pairs_follow_step_and_mini_batch_number() -> None:
    learner = Learner()
    objective = SFTObjective("actor/ptx_loss", 0.5)
    updates = Updates(
        objective=None,
        budget=BUDGET,
        minibatches=MiniBatches(num_prompts=1, num_epochs=2, shuffle=True, seed=0),
        supervision=Supervision(pairs=Pairs(), objective=objective, num_minibatches=4),  # type: ignore[arg-type]
    )
    actor = Model(name="actor", learner=learner, budget=BUDGET, updates=updates)  # type: ignore[arg-type, var-annotated]
    for step in (3, 0):
        actor.update(alone(experience()), step=step)
    numbers: list[Any] = [term.batch for term in learner.extra_terms]
    assert numbers == [12, 13, 14, 15, 0, 1, 2, 3]
    assert {(term.objective, term.temperature, term.against) for term in learner.extra_terms} == {
        (objective, 1.0, None)
    }


class Reader:
    """A frozen policy that answers with the response tokens, times `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor, self.num_read = factor, 0

    def infer(self, batch: Sharded[Rollouts]) -> PolicyOutputs:
        self.num_read += len(batch)
        found = self.factor * batch.share.responses.float()
        return PolicyOutputs(log_probs=found)


def test_each_reference_reads_samples_of_its_data_source() -> None:
    asked = prompts([4, 6, 5])
    sources = ["math", "code", "math"]
    asked = Prompts(
        prompts=[replace(each, data_source=name) for each, name in zip(asked.prompts, sources, strict=True)]
    )
    batch = answer(asked, [2, 3, 1, 2, 3, 3])
    math, unused, others = Reader(2.0), Reader(5.0), Reader(3.0)
    reference = FrozenPolicies(PerDataSource(named={"math": math, "poetry": unused}, other=others))  # type: ignore[dict-item,arg-type]
    outputs = reference.infer(alone(batch))
    factors = torch.tensor([2.0, 2.0, 3.0, 3.0, 2.0, 2.0]).repeat_interleave(batch.num_tokens)
    assert torch.equal(outputs.log_probs, factors * batch.responses)
    assert (math.num_read, unused.num_read, others.num_read) == (4, 0, 2)
