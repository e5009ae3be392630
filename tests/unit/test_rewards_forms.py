"""Rewards of each form in real processes: classes with state, asynchronous functions and batch functions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from megarl.rewards.calls import AsBatch
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_pool
from megarl.sandbox.pool import Pool, ScoringResult
from megarl.sandbox.results import RuleResult
from megarl.sandbox.wire import pack
from tests.support.places import without_places
from tests.support.programs import ROOT

PATH = str(ROOT / "tests" / "support" / "own_rewards.py")
LATE = "it took longer than reward_model.timeout_s=1"


@contextmanager
def pool_of(name: str, *, kwargs: dict[str, Any] | None = None, **changes: Any) -> Iterator[Pool]:
    section = RulesSection(**{"num_workers": 1, "timeout_s": 100.0, **changes})
    pool = make_pool(section, CustomRewardSection(path=PATH, name=name, reward_kwargs=kwargs or {}))
    try:
        yield pool
    finally:
        pool.close()


def results_of(pool: Pool, *texts: str, truth: Any = None) -> list[ScoringResult]:
    """Score responses that all wait when the first process is ready."""
    row = {"data_source": "own", "ground_truth": truth, "extra_info": {}}
    with pool._changed:
        futures = [pool.submit(pack(row | {"solution_str": text})) for text in texts]
    return pool.wait(futures)


def scores(results: Sequence[ScoringResult]) -> list[float | None]:
    return [result.numbers.get("score") for result in results]


@pytest.mark.parametrize(("isolation", "expected"), [("response", [5.0, 5.0, 5.0]), ("process", [5.0, 7.0, 9.0])])
def test_class_is_constructed_once_and_state_follows_isolation(isolation: str, expected: list[float]) -> None:
    with pool_of("Counter", kwargs={"first": 5, "step": 2}, isolation=isolation, canary_every=0) as pool:
        found = results_of(pool, "a", "b", "c")
    assert scores(found) == expected
    assert len({result.numbers["process"] for result in found}) == (3 if isolation == "response" else 1)
    assert len({result.numbers["constructor"] for result in found}) == 1
    assert {result.numbers["objects"] for result in found} == {1.0}


def test_asynchronous_calls_run_together_up_to_the_limit() -> None:
    with pool_of("Meeting") as pool:
        assert scores(results_of(pool, *"abcdef", truth=6)) == [6.0] * 6  # each waits for all others
    with pool_of("act", concurrency=3) as pool:
        assert scores(results_of(pool, *["tells how many run"] * 7)) == [3.0, 2.0, 1.0, 3.0, 2.0, 1.0, 1.0]


def test_failed_or_late_async_call_fails_alone() -> None:
    with pool_of("act", kwargs={"bonus": 0.5}, timeout_s=1.0) as pool:
        found = results_of(pool, "good", "raises", "waits", "nan", "raises a timeout", "good")
        again = results_of(pool, "good")
    assert scores([*found, *again]) == [1.5, None, None, None, None, 1.5, 1.5]
    assert [(result.fault, without_places(result.detail)) for result in found[1:3]] == [
        ("error", "KeyError: 'answer'"),
        ("timeout", LATE),
    ]
    assert found[3].detail.startswith("TypeError: a reward returns a finite number")
    assert without_places(found[4].detail) == "TimeoutError: of its own"
    assert found[0].seconds > 0.9  # the time of the latest; the pool hears of the call a moment after its limit starts


@pytest.mark.parametrize(
    ("culprit", "fault"),
    [
        ("blocks", ("timeout", LATE)),
        ("dies", ("error", "its process ended (exit code 3)")),
        ("leaves", ("error", "SystemExit: enough")),
    ],
)
def test_response_ending_shared_calls_fails_alone(culprit: str, fault: tuple[str, str]) -> None:
    with pool_of("act", timeout_s=1.0) as pool:
        found = results_of(pool, "good", culprit, "good")
    assert scores(found) == [1.0, None, 1.0]
    assert (found[1].fault, without_places(found[1].detail)) == fault


def test_batch_function_scores_each_waiting_row() -> None:
    with pool_of("by_batch", kwargs={"bonus": 0.25}, concurrency=4) as pool:
        found = results_of(pool, "a", "b", "nan", "d", "e")
    assert scores(found) == [4.0, 4.0, None, 4.0, 1.0]
    assert found[0].numbers["bonus"] == 0.25
    assert "not {'bonus': 0.25, 'score': nan}" in found[2].detail
    with pool_of("Batches") as pool:
        assert scores(results_of(pool, "a", "bb")) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("culprit", "others", "detail"),
    [
        ("raises", 1.0, "KeyError: 'answer'"),
        ("blocks", 1.0, LATE),
        ("is short", None, "ValueError: a batch function returned 2 scores for 3 responses"),
        ("is a text", None, "TypeError: a batch function returns a list with the score of each response, not '1.0'"),
    ],
)
def test_failed_batch_is_retried_by_row_unless_malformed(culprit: str, others: float | None, detail: str) -> None:
    with pool_of("by_batch", timeout_s=1.0) as pool:
        found = results_of(pool, "a", culprit, "c")
    assert scores(found) == [others, None, others]
    details = [without_places(result.detail) for result in found]
    assert details[1] == detail
    assert others or details == [detail] * 3


def test_forms_are_summed_with_other_rules() -> None:
    with pool_of("act", weights={"custom": 1.0, "format": 0.5}) as pool:
        found = results_of(pool, "<think>so</think><answer>4</answer>", "raises")
    assert scores(found) == [1.5, None]
    assert without_places(found[1].detail) == "KeyError: 'answer'"


@pytest.mark.parametrize(
    ("name", "takes_ids"),
    [("with_ids", True), ("batch_with_ids", True), ("later_with_ids", True), ("Counter", False), ("by_batch", False)],
)
@pytest.mark.parametrize(("isolation", "canary_every"), [("response", 0), ("process", 1)])
def test_a_reward_that_names_them_gets_the_tokens(
    name: str, takes_ids: bool, isolation: str, canary_every: int
) -> None:
    kwargs = {"first": 1} if name == "Counter" else None
    with pool_of(name, kwargs=kwargs, isolation=isolation, canary_every=canary_every) as pool:
        assert pool.takes_ids == takes_ids
        row = {"data_source": "own", "ground_truth": None, "extra_info": {}, "solution_str": "a"}
        found = pool.wait([pool.submit(pack(row | {"solution_ids": ids})) for ids in ([7, 2], [7, 8, 2])])
    assert scores(found) == [2.0, 3.0] or not takes_ids
    assert [result.detail for result in found] == ["", ""]


def test_arrays_are_lists_of_scores() -> None:
    rows = [{"data_source": "", "solution_str": text, "ground_truth": None, "extra_info": {}} for text in "ab"]
    found = AsBatch(lambda **lists: np.array([0.5, 1.5], dtype=np.float32))(rows, 0.0)
    assert found == [RuleResult({"score": 0.5}, None), RuleResult({"score": 1.5}, None)]
