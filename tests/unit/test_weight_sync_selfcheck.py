"""The self-check's numbers: differences per replica, stale replicas, and the steps in which a check is due."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.weight_sync.selfcheck import CheckResult, SelfCheck, fixed_prompts, probability_differences, stale_replicas
from tests.support.ranks import world_of_one
from tests.support.records import answer, prompts


def test_differences_compare_probabilities_for_each_replica_alone() -> None:
    # Two replicas respond to one prompt with 1 and 2 tokens, each with log-probability -1.
    answers = answer(prompts([3]), [1, 2])
    says = torch.tensor([-1.0, -1.0, -2.0])  # the first response is not as long as the second
    means, largest = probability_differences(answers, says, num_replicas=2)
    gap = torch.exp(torch.tensor(-1.0)) - torch.exp(torch.tensor(-2.0))
    torch.testing.assert_close(means, torch.stack([torch.zeros(()), gap / 2]))
    torch.testing.assert_close(largest, torch.stack([torch.zeros(()), gap]))


def seen(engine: list[list[float]], trainer: list[list[float]]) -> CheckResult:
    return CheckResult([([7, 8], numbers) for numbers in engine], [([7, 8], numbers) for numbers in trainer])


OLD = seen([[-1.0, -2.0]] * 4, [[-1.0, -2.0]] * 4)  # two prompts, two replicas


@pytest.mark.parametrize(
    ("engine", "trainer", "stale"),
    [
        ([[-1.0, -2.0]] * 4, [[-1.1, -2.1]] * 4, [0, 1]),
        ([[-1.0, -2.0], [-1.0, -2.1]] * 2, [[-1.1, -2.1]] * 4, [0]),  # the second has moved
        ([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-1.1, -2.0]], [[-1.1, -2.1]] * 4, [0]),  # in one response
        ([[-1.0, -2.0]] * 4, [[-1.0, -2.0]] * 4, []),  # so has nobody: a step of size zero
        ([[-1.0, -2.0]] * 4, [[-1.0, -2.1], [-1.0, -2.0]] * 2, []),  # hardly: it may round away
    ],
)
def test_unchanged_replica_is_stale_if_trainer_changes(
    engine: list[list[float]], trainer: list[list[float]], stale: list[int]
) -> None:
    assert stale_replicas(OLD, seen(engine, trainer), num_replicas=2) == stale


def test_other_tokens_are_not_the_same_answer() -> None:
    now = CheckResult([([7, 9], [-1.0, -2.0])] * 4, [([7, 9], [-1.1, -2.1])] * 4)
    assert stale_replicas(OLD, now, num_replicas=2) == []


@pytest.mark.parametrize("max_model_len", [2, 40, 1024])
def test_fixed_prompts_are_distinct_constant_and_fit_engine(max_model_len: int) -> None:
    asked, num_tokens = fixed_prompts(211, max_model_len=max_model_len)
    assert asked == fixed_prompts(211, max_model_len=max_model_len)[0]
    assert len({tuple(prompt.token_ids) for prompt in asked}) == len(asked)
    for prompt in asked:
        assert 1 <= len(prompt.token_ids) <= max_model_len - num_tokens
        assert all(0 <= token < 211 for token in prompt.token_ids)


@dataclass(frozen=True)
class Trainer:
    """As much of a learner as decides whether a check is due."""

    tensor: torch.Tensor
    temperature: float = 1.0
    architecture: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=11))

    @contextmanager
    def weights(self) -> Iterator[dict[str, torch.Tensor]]:
        yield {"weight": self.tensor}


@pytest.mark.parametrize(("check_every", "checked"), [(0, [0, 3]), (2, [0, 2, 3, 4]), (1, [0, 1, 2, 3, 4])])
def test_first_two_distinct_weights_are_always_checked(check_every: int, checked: list[int]) -> None:
    trainer = Trainer(torch.arange(6.0))
    limits = Limits.of(SyncSection(), "float32")
    due = []
    with world_of_one(), patch("megarl.weight_sync.selfcheck.generate_on_replicas"):
        check = SelfCheck(limits, SimpleNamespace(max_model_len=40), trainer, None, check_every=check_every)
        for step in range(5):
            if step >= 3:  # the actor learns, after a warm-up of the critic
                trainer.tensor[0] += 1.0
            for _ in range(2):  # a validation, and the step
                if check.is_due(step):
                    check.generate(step=step)
                    due.append(step)
    assert due == checked
