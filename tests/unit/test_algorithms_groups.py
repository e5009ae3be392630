"""Compare the statistics of several responses to one prompt with values by hand and by brute force."""

from collections.abc import Iterable
from itertools import combinations, permutations
from math import comb
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.groups import best_of, majority, statistics

scores_of_a_prompt = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=7)


def test_best_of_by_hand() -> None:
    # of the 6 pairs of 0 1 3 7 the best is 7 in three, 3 in two and 1 in one
    scores = torch.tensor([[3.0, 0.0, 7.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert best_of(scores, 2).tolist() == pytest.approx([(3 * 7 + 2 * 3 + 1) / 6, 2.0])
    assert best_of(scores, 1).tolist() == pytest.approx([11 / 4, 2.0])
    assert best_of(scores, 4).tolist() == pytest.approx([7.0, 2.0])


@given(scores_of_a_prompt, st.data())
def test_best_of_k_averages_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    bests = [max(drawn) for drawn in combinations(scores, k)]
    assert best_of(torch.tensor([scores]), k).item() == pytest.approx(sum(bests) / len(bests), abs=1e-6)


@pytest.mark.parametrize(("num", "right", "k"), [(10, 3, 4), (256, 5, 64), (8, 0, 2), (8, 7, 4)])
def test_best_of_binary_scores_equals_pass_at_k(num: int, right: int, k: int) -> None:
    scores = torch.zeros(1, num)
    scores[0, :right] = 1.0
    assert best_of(scores, k).item() == pytest.approx(1 - comb(num - right, k) / comb(num, k))


def test_best_of_k_is_unbiased() -> None:
    # scores 0, 1, 4 with probabilities 1/2, 1/4, 1/4: over all 3**3 equally long draws of 3 answers, weighed by chance
    chances = {0.0: 0.5, 1.0: 0.25, 4.0: 0.25}
    draws = torch.cartesian_prod(*[torch.tensor(list(chances))] * 3)
    weights = torch.tensor([[chances[score] for score in draw] for draw in draws.tolist()]).prod(-1).double()
    expected_best_of_two = 4 * (1 - 0.75**2) + 1 * (0.75**2 - 0.5**2)
    assert (best_of(draws, 2) @ weights).item() == pytest.approx(expected_best_of_two)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["7", "8", "7"], [1.0, 0.0, 1.0], 1.0),
        (["7", "8", "8"], [1.0, 0.0, 0.0], 0.0),
        (["7", "8"], [1.0, 0.0], 0.5),  # one of the two is drawn
        (["7", "8", "9", "8", "7"], [1.0, 0.0, 0.0, 0.2, 1.0], 0.55),  # 7 scores 1.0, 8 scores 0.1
        (["", "", "", "7"], [0.0, 0.0, 0.0, 1.0], 1.0),  # who has no answer has no vote
        (["", ""], [0.1, 0.3], 0.2),
        (["7"], [0.4], 0.4),
    ],
)
def test_majority_by_hand(answers: list[str], scores: list[float], expected: float) -> None:
    assert majority(answers, scores) == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.floats(0, 1)), min_size=1, max_size=5))
def test_majority_ignores_order_and_averages_over_ties(votes: list[tuple[str, float]]) -> None:
    answers = [answer for answer, _ in votes]
    told = [answer for answer in answers if answer] or answers
    winners = [answer for answer in set(told) if all(told.count(answer) >= told.count(other) for other in told)]
    means = []
    for winner in winners:
        won = [score for answer, score in votes if answer == winner]
        means.append(sum(won) / len(won))
    for order in permutations(votes):
        assert majority(*map(list, zip(*order, strict=True))) == pytest.approx(sum(means) / len(means))


def test_statistics_of_two_prompts() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    found = statistics(list(scores), [["7", "8", "8"], ["5", "5", "6"]], num=3)
    assert found == pytest.approx(
        {
            "mean@3": 0.5,
            "std@3": (1 / 3) ** 0.5,  # variances (2/3)**2 + 2 * (1/3)**2 over 2 in both
            "best@2/mean": (2 / 3 + 1.0) / 2,
            "best@3/mean": 1.0,
            "maj@3": 0.5,
        }
    )


@pytest.mark.parametrize(("num", "names"), [(2, {2}), (4, {2, 4}), (5, {2, 4, 5}), (16, {2, 4, 8, 16})])
def test_best_of_covers_powers_of_two_and_all(num: int, names: set[int]) -> None:
    found = statistics(list(torch.rand(3, num)), None, num=num)
    assert found.keys() == {f"mean@{num}", f"std@{num}", *(f"best@{k}/mean" for k in names)}


def test_one_answer_has_no_statistics() -> None:
    assert statistics(list(torch.rand(3, 1)), [["1"], ["2"], ["3"]], num=1) == {}


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=4), min_size=1, max_size=5))
def test_statistics_average_over_prompts_with_enough_scores(prompts: list[list[float]]) -> None:
    def mean(values: Iterable[float]) -> Any:
        found = list(values)
        return pytest.approx(fmean(found), abs=1e-6) if found else None

    def best(of_prompt: list[float], k: int) -> float:
        return fmean(max(drawn) for drawn in combinations(of_prompt, k))

    found = statistics([torch.tensor(of_prompt) for of_prompt in prompts], [["7"] * len(p) for p in prompts], num=4)
    assert found["mean@4"] == mean(map(fmean, prompts))
    assert found["maj@4"] == mean(map(fmean, prompts))
    assert found.get("std@4") == mean(stdev(of_prompt) for of_prompt in prompts if len(of_prompt) > 1)
    for k in (2, 4):
        assert found.get(f"best@{k}/mean") == mean(best(of_prompt, k) for of_prompt in prompts if len(of_prompt) >= k)
