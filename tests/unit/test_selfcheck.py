"""What the self-check makes of numbers: differences per replica, and replicas that stand still."""

import pytest
import torch

from megarl.selfcheck import Seen, fixed_prompts, probability_differences, stale_replicas
from tests.records import answer, prompts


def test_differences_are_those_of_probabilities_and_of_each_replica_alone() -> None:
    # Two replicas answer one prompt with 1 and 2 tokens; the record says log-probability -1 of every token.
    answers = answer(prompts([3]), [1, 2])
    says = torch.tensor([[-1.0, 9.0], [-1.0, -2.0]])  # what stands behind the end of an answer must not count
    means, largest = probability_differences(answers, says, num_replicas=2)
    gap = torch.exp(torch.tensor(-1.0)) - torch.exp(torch.tensor(-2.0))
    torch.testing.assert_close(means, torch.stack([torch.zeros(()), gap / 2]))
    torch.testing.assert_close(largest, torch.stack([torch.zeros(()), gap]))


def seen(engine: list[list[float]], trainer: list[list[float]]) -> Seen:
    return Seen([([7, 8], numbers) for numbers in engine], [([7, 8], numbers) for numbers in trainer])


OLD = seen([[-1.0, -2.0]] * 4, [[-1.0, -2.0]] * 4)  # two prompts, two replicas


@pytest.mark.parametrize(
    ("engine", "trainer", "stale"),
    [
        ([[-1.0, -2.0]] * 4, [[-1.1, -2.1]] * 4, [0, 1]),
        ([[-1.0, -2.0], [-1.0, -2.1]] * 2, [[-1.1, -2.1]] * 4, [0]),  # the second has moved
        ([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-1.1, -2.0]], [[-1.1, -2.1]] * 4, [0]),  # in one answer
        ([[-1.0, -2.0]] * 4, [[-1.0, -2.0]] * 4, []),  # so has nobody: a step of size zero
        ([[-1.0, -2.0]] * 4, [[-1.0, -2.1], [-1.0, -2.0]] * 2, []),  # hardly: it may round away
    ],
)
def test_a_replica_is_stale_that_stands_still_while_the_trainer_moves(
    engine: list[list[float]], trainer: list[list[float]], stale: list[int]
) -> None:
    assert stale_replicas(OLD, seen(engine, trainer), num_replicas=2) == stale


def test_other_tokens_are_not_the_same_answer() -> None:
    now = Seen([([7, 9], [-1.0, -2.0])] * 4, [([7, 9], [-1.1, -2.1])] * 4)
    assert stale_replicas(OLD, now, num_replicas=2) == []


@pytest.mark.parametrize("max_model_len", [2, 40, 1024])
def test_fixed_prompts_are_different_fit_the_engine_and_never_change(max_model_len: int) -> None:
    asked, num_tokens = fixed_prompts(211, max_model_len=max_model_len)
    assert asked == fixed_prompts(211, max_model_len=max_model_len)[0]
    assert len({tuple(prompt.token_ids) for prompt in asked}) == len(asked)
    for prompt in asked:
        assert 1 <= len(prompt.token_ids) <= max_model_len - num_tokens
        assert all(0 <= token < 211 for token in prompt.token_ids)
