"""What a role does around its learner, which here only writes down what it is given."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from megarl.batch import Experience, Marked, Scored
from megarl.learner.config import ActorSection, PolicyLossSection
from megarl.learner.learner import Budget
from megarl.objectives import mark
from megarl.roles import Model, Updates
from tests.records import answer, prompts

BUDGET = Budget(max_tokens=64, max_sequences=None)


class Learner:
    def __init__(self) -> None:
        self.minibatches: list[Experience] = []

    def update(self, minibatches: Iterable[Experience], objective: Any, budget: Budget, **_: Any) -> dict[str, float]:
        self.minibatches += minibatches
        return {"lr": 0.5, "actor/pg_loss": 1.0}


def experience() -> Experience:
    """Two prompts with two responses each; of either prompt, the last token of the second response stands out."""
    rollouts = answer(prompts([4, 6]), [2, 2, 2, 2])
    advantages = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0]])
    log_probs = torch.tensor([[-2.0, -2.0], [-2.0, -1.0], [-2.0, -2.0], [-2.0, -1.0]])
    zeros = torch.zeros(4, 2)
    zero = torch.zeros(4)
    return rollouts.extend(Scored, texts=[""] * 4, scores=zero, accuracies=zero).extend(
        Experience,
        old_log_probs=log_probs,
        ref_log_probs=log_probs,
        values=zeros,
        advantages=advantages,
        returns=zeros,
    )


def test_every_mini_batch_is_prepared_whole() -> None:
    learner = Learner()
    section = ActorSection(policy_loss=PolicyLossSection(loss_mode="kl_cov", kl_cov_ratio=0.25))
    updates = Updates(
        objective=None,
        budget=BUDGET,
        num_prompts=1,
        num_epochs=2,
        shuffle=True,
        seed=0,
        prepare=partial(mark, section=section),
    )
    actor = Model(name="actor", learner=learner, budget=BUDGET, updates=updates)  # type: ignore[arg-type, var-annotated]
    assert actor.update(experience(), step=0) == {"actor/lr": 0.5, "actor/pg_loss": 1.0}
    assert len(learner.minibatches) == 4
    for minibatch in learner.minibatches:
        assert isinstance(minibatch, Marked)
        assert minibatch.marked.tolist() == [[False, False], [False, True]]
