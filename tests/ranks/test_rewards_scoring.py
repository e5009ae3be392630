"""The reward on several ranks: all ranks that have a sample get its score, whichever called the reward.

One of them, which reports, also gets its text, its answer and the cause of a failure.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch.distributed as dist

from megarl.batch import Rollouts
from megarl.rewards.scoring import Decode
from tests.support.places import without_places
from tests.support.ranks import RankPool
from tests.support.records import answer, prompts
from tests.support.spread import spread

pytestmark = pytest.mark.ranks

BATCH: Rollouts = answer(prompts([1, 1, 1]), [2, 1, 3, 1, 2, 2])  # the response of sample i begins with 10 * (i + 1)
TEXTS = ["10 11", "20", "30 31 32", "40", "50 51", "60 61"]
REWARD = """
import time
def compute_score(solution_str, ground_truth, **_):
    if solution_str == "40":
        {on_sample_3}
    return {{"score": len(solution_str.split()), "acc": 1, "pred": solution_str, "letters": len(solution_str)}}
"""
FAILS = "def compute_score(**_): raise KeyError('answer')\n"
PAYS = """
paid = 0.0
def compute_score(solution_str, **_):
    global paid
    paid = max(paid, float(solution_str == "30 31 32"))
    return paid
"""
UNREADABLE = replace(
    BATCH,
    prompts=[replace(prompt, extra_info={"x": {1, 2}} if prompt.index == 1 else {}) for prompt in BATCH.prompts],
)
OWNERS = [[1, 1, 1, 0, 0, 1], [1] * 6]  # the rank that has each sample; the first may have none


def words(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def words_without_30(ids: Sequence[int]) -> str:
    if 30 in ids:
        raise ValueError("token 30 has no text")
    return words(ids)


def judged(
    path: str,
    started: Sequence[tuple[int, int]] = (),
    rollouts: Rollouts = BATCH,
    timeout_s: float = 100.0,
    on_failure: Any = "score",
    isolation: Any = "response",
    owners: Sequence[int] | None = None,
    decode: Decode = words,
) -> Any:
    """Return texts, scores, accuracies, metrics and warnings; or the error.

    `started` are pairs (rank, sample): that rank starts to score the sample before `score` is called.
    """
    import logging

    from megarl.rewards.collective import RewardError
    from megarl.rewards.config import CustomRewardSection, RulesSection
    from megarl.rewards.scoring import RuleScorer

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    warned: list[str] = []
    logging.getLogger("megarl.rewards.collective").addHandler(handler := Warnings())
    section = RulesSection(
        num_workers=1,
        default_score=-1.0,
        timeout_s=timeout_s,
        on_failure=on_failure,
        isolation=isolation,
        canary_every=1,
    )
    scorer = RuleScorer.make(section, CustomRewardSection(path=path), decode)
    for rank, sample in started:
        if rank == dist.get_rank():
            scorer.begin(rollouts.prompt_of(sample), rollouts.response_ids(sample).tolist())
    try:
        samples, metrics = scorer.score(spread(rollouts, owners))
    except (RewardError, ValueError) as error:
        return str(error)
    finally:
        scorer.pool.close()
        logging.getLogger("megarl.rewards.collective").removeHandler(handler)
    assert not scorer._begun
    scored = samples.share
    assert (scored.failures is None) == (on_failure != "mask")
    was_called = (scored.accuracies == 1.0).tolist()
    answers = [text if called and text else None for text, called in zip(scored.texts, was_called, strict=True)]
    assert scored.answers == answers
    assert all(scored.texts) or not samples.shares.reports
    return list(scored.texts), scored.scores.tolist(), scored.accuracies.tolist(), metrics, warned


def counted(path: str, owners: Sequence[int] | None) -> tuple[int, int]:
    """Return how many rewards people saw done, of how many."""
    from megarl.platform import progress

    with progress.within("reward"):
        judged(path, owners=owners)
        phase = progress.now()
    assert phase
    return phase.done, phase.total


def judged_with(pool: RankPool, path: Path, on_sample_3: str, *args: Any) -> list[Any]:
    (path / "mine.py").write_text(REWARD.format(on_sample_3=on_sample_3))
    return pool.run(2, judged, str(path / "mine.py"), *args)


@pytest.mark.parametrize("started", [[], [(0, 5), (0, 0), (1, 1), (0, 2), (1, 3), (1, 4)], [(1, 0), (1, 1), (1, 5)]])
def test_every_rank_has_all_scores_in_sample_order(
    pool: RankPool, tmp_path: Path, started: list[tuple[int, int]]
) -> None:
    ranks = judged_with(pool, tmp_path, "pass", started)
    assert ranks[0][1:] == ranks[1][1:]
    texts, scores, accuracies, metrics, warned = ranks[0]
    assert (texts, scores, accuracies, warned) == (TEXTS, [2.0, 1.0, 3.0, 1.0, 2.0, 2.0], [1.0] * 6, [])
    assert metrics["reward/error_rate"] == metrics["reward/timeout_rate"] == 0.0
    assert metrics["reward/acc/mean"].value == 1.0


@pytest.mark.parametrize("owners", [None, *OWNERS])
def test_every_awaited_reward_is_counted_on_every_rank(
    pool: RankPool, tmp_path: Path, owners: list[int] | None
) -> None:
    (tmp_path / "mine.py").write_text(REWARD.format(on_sample_3="time.sleep(1.5)"))
    first, second = pool.run(2, counted, str(tmp_path / "mine.py"), owners)
    assert first == second
    assert 1 <= first[0] == first[1] <= 6


@pytest.mark.parametrize("on_failure", ["mask", "score"])
def test_response_altering_reward_stops_all_ranks(on_failure: str, pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PAYS)
    started = [(0, 2), (0, 0), (0, 1), (0, 3), (0, 4), (0, 5)]
    first, second = pool.run(2, judged, str(tmp_path / "mine.py"), started, BATCH, 100.0, on_failure, "process")
    assert first == second
    assert first.startswith(
        "reward_model.isolation=process: a response has changed the reward: a wrong response earns 1"
    )
    assert "Scores of the last 1 calls (reward_model.canary_every) may be wrong" in first


@pytest.mark.parametrize(
    ("on_sample_3", "fault", "cause"),
    [
        ("raise KeyError('answer')", "error", "KeyError: 'answer'"),
        ("return '0.5'", "error", "TypeError: a reward returns a finite number or a dict with such a 'score'"),
        ("time.sleep(1000)", "timeout", "it took longer than reward_model.timeout_s=4"),
    ],
)
def test_response_without_score_gets_default_and_one_warning(
    pool: RankPool, tmp_path: Path, on_sample_3: str, fault: str, cause: str
) -> None:
    ranks = judged_with(pool, tmp_path, on_sample_3, [], BATCH, 4.0 if fault == "timeout" else 100.0)
    assert ranks[0][0] == TEXTS
    for _, scores, accuracies, metrics, _ in ranks:
        assert scores == [2.0, 1.0, 3.0, -1.0, 2.0, 2.0]
        assert accuracies == [1.0, 1.0, 1.0, -1.0, 1.0, 1.0]
        rates = {"timeout": 0.0, "error": 0.0, fault: 1 / 6}
        assert {kind: metrics[f"reward/{kind}_rate"] for kind in rates} == rates
    assert [len(rank[-1]) for rank in ranks] == [1, 0]
    (warning,) = ranks[0][-1]
    assert warning.startswith("the reward failed on sample 3 (data source 'countdown', data row 1, response '40'): ")
    assert cause in warning
    assert warning.endswith("; it gets reward_model.default_score=-1.0")


def test_a_response_may_be_left_without_a_score(pool: RankPool, tmp_path: Path) -> None:
    for rank, found in enumerate(judged_with(pool, tmp_path, "raise KeyError(7)", [], BATCH, 100.0, "mask")):
        _, scores, accuracies, metrics, warned = found
        assert [sample for sample, score in enumerate(scores) if math.isnan(score)] == [3]
        assert [sample for sample, accuracy in enumerate(accuracies) if math.isnan(accuracy)] == [3]
        assert metrics["reward/error_rate"] == 1 / 6
        assert len(warned) == (rank == 0)
        assert all(words.endswith("; training ignores it (reward_model.on_failure=mask)") for words in warned)


def test_a_failure_may_stop_every_rank(pool: RankPool, tmp_path: Path) -> None:
    message = (
        "the reward failed on sample 3 (data source 'countdown', data row 1, response '40'): KeyError: 7 "
        "(reward_model.on_failure=stop)"
    )
    found = judged_with(pool, tmp_path, "raise KeyError(7)", [], BATCH, 100.0, "stop")
    assert [without_places(said) for said in found] == [message] * 2


def test_reward_failing_on_all_responses_stops_every_rank(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS)
    message = (
        "the reward fails on all 6 responses; the reward failed on sample 0 (data source 'countdown', data row 0, "
        f"response '10 11'): KeyError: 'answer' ({tmp_path / 'mine.py'}:1, `{FAILS.strip()}`)"
    )
    assert pool.run(2, judged, str(tmp_path / "mine.py")) == [message] * 2


def test_row_unreadable_by_reward_stops_every_rank(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(**_): return 1.0\n")
    message = "data row 1: a set cannot be passed to a reward"
    assert pool.run(2, judged, str(tmp_path / "mine.py"), [(1, 2)], UNREADABLE) == [message] * 2


@pytest.mark.parametrize("started", [[], [(1, 2)]])
def test_undecodable_response_stops_every_rank(started: Any, pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(**_): return 1.0\n")
    given = (str(tmp_path / "mine.py"), started, BATCH, 100.0, "score", "response", None, words_without_30)
    assert pool.run(2, judged, *given) == ["token 30 has no text"] * 2


def judged_apart(
    pool: RankPool,
    path: Path,
    source: str,
    owners: Sequence[int],
    *,
    on_failure: str,
    rollouts: Rollouts = BATCH,
    isolation: str = "response",
) -> tuple[Any, list[Any]]:
    """Return what `judged` returns to one rank that has all samples, and to ranks that have those that they own."""
    (path / "mine.py").write_text(source)
    given = (str(path / "mine.py"), [], rollouts, 100.0, on_failure, isolation)
    [alone] = pool.run(1, judged, *given)
    return alone, pool.run(2, judged, *given, owners)


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize(
    ("source", "on_failure"),
    [
        (REWARD.format(on_sample_3="pass"), "score"),
        (REWARD.format(on_sample_3="raise KeyError(7)"), "score"),
        (FAILS, "mask"),
    ],
)
def test_ranks_with_own_samples_report_together(
    pool: RankPool, tmp_path: Path, source: str, on_failure: str, owners: list[int]
) -> None:
    (*columns, metrics, warned), ranks = judged_apart(pool, tmp_path, source, owners, on_failure=on_failure)
    for rank, (*found, _, _) in enumerate(ranks):
        mine = [sample for sample, owner in enumerate(owners) if owner == rank]
        np.testing.assert_equal(found, [[column[sample] for sample in mine] for column in columns])
    assert ranks[0][-2] == ranks[1][-2]
    assert ranks[0][-2] | {"reward/slowest_s": 0.0} == metrics | {"reward/slowest_s": 0.0}
    assert [rank[-1] for rank in ranks] == [warned, []]


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize(
    ("source", "rollouts", "on_failure", "isolation"),
    [
        (REWARD.format(on_sample_3="raise KeyError(7)"), BATCH, "stop", "response"),
        (FAILS, BATCH, "stop", "response"),
        (FAILS, BATCH, "score", "response"),
        (PAYS, BATCH, "score", "process"),
        (REWARD.format(on_sample_3="pass"), UNREADABLE, "score", "response"),
    ],
)
def test_ranks_with_own_samples_stop_together(
    pool: RankPool,
    tmp_path: Path,
    source: str,
    rollouts: Rollouts,
    on_failure: str,
    isolation: str,
    owners: list[int],
) -> None:
    settings: Any = {"rollouts": rollouts, "on_failure": on_failure, "isolation": isolation}
    alone, ranks = judged_apart(pool, tmp_path, source, owners, **settings)
    assert isinstance(alone, str)
    assert ranks == [alone, alone]


def texts_met(path: str, owners: Sequence[int] | None) -> tuple[list[str], list[str], list[str]]:
    """Return the texts that this rank decodes, the texts that it gets, and those that all ranks get."""
    said, gather = list[str](), dist.all_gather_object

    def note(results: list[Any], *args: Any, **options: Any) -> None:
        gather(results, *args, **options)
        said.append(repr(results))

    decode = Mock(wraps=words)
    with patch.object(dist, "all_gather_object", note):
        texts, *_ = judged(path, owners=owners, decode=decode)
    told = [text for text in TEXTS if any(repr(text) in of_ranks for of_ranks in said)]
    return [words(*call.args) for call in decode.call_args_list], texts, told


def test_texts_travel_to_the_rank_that_reports_alone(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD.format(on_sample_3="pass"))
    path = str(tmp_path / "mine.py")
    own = ["", TEXTS[1], "", TEXTS[3], "", TEXTS[5]]
    assert pool.run(2, texts_met, path, None) == [(TEXTS[0::2], TEXTS, []), (TEXTS[1::2], own, [])]
    apart = [TEXTS[3:5], [*TEXTS[:3], TEXTS[5]]]
    assert pool.run(2, texts_met, path, OWNERS[0]) == [(texts, texts, []) for texts in apart]
