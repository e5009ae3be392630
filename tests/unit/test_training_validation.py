"""Which numbers a validation gives of each data source, and which samples it shows."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch import Prompts, Rollouts, Scored
from megarl.distributed.sharded import Sharded
from megarl.rewards.collective import Mean, RewardError, ScoringMetrics
from megarl.samples.store import SampleStore
from megarl.tracking.protocol import NullTracker
from megarl.tracking.timers import Timers
from megarl.training.validation import Validation
from tests.support.disks import small_disk
from tests.support.ranks import world_of_one
from tests.support.records import alone, answer, prompts

SOURCES = ["gsm8k", "math", "gsm8k"]
SCORES = [1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]  # four to each prompt
ANSWERS = {4: "5", 5: "5", 6: "7"}  # the reward of the second data source tells of three, one has failed


class World(NullTracker):
    """Three prompts in batches of two and one, `num` responses to each, with the first of SCORES."""

    def __init__(self, num: int, ids: Sequence[str | None], failed: Sequence[int]) -> None:
        self.failed = failed
        self.num, self.ids, self.given, self.tables = num, ids, 0, dict[str, Sequence[Any]]()

    def batches(self) -> Iterator[Prompts]:
        asked = [
            replace(prompt, data_source=source, text=f"question {number}", prompt_id=self.ids[number])
            for number, (prompt, source) in enumerate(zip(prompts([1, 1, 1]).prompts, SOURCES, strict=True))
        ]
        yield Prompts(prompts=asked[:2])
        yield Prompts(prompts=asked[2:])

    @contextmanager
    def awake(self, timers: Timers, *, step: int) -> Iterator[dict[str, float]]:
        yield {"sync/check_probs_diff_mean": 0.0}

    def validate(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        return alone(answer(prompts, [1] * self.num * len(prompts.prompts)))

    def forget(self) -> None:
        pass

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], ScoringMetrics]:
        first, self.given = self.given, self.given + len(samples)
        scores = torch.tensor(SCORES[first : self.given])
        texts = [f"answer {first + number}" for number in range(len(samples))]
        answers = [ANSWERS.get(number) for number in range(first, self.given)]
        failures = ["timeout" if number in self.failed else None for number in range(first, self.given)]
        scores[[failure is not None for failure in failures]] = math.nan
        fields = {"texts": texts, "scores": scores, "accuracies": scores, "answers": answers, "failures": failures}
        return samples.with_share(samples.share.extend(Scored, **fields)), {
            "reward/error_rate": first / 10,
            "reward/format/mean": Mean(1.0 - bool(first), 1),
            "reward/slowest_s": 2.0 - first,
        }

    def log_table(self, name: str, rows: Sequence[Any], *, step: int) -> None:
        self.tables[name] = rows


def validate(
    num: int,
    *,
    shown: int = 3,
    ids: Sequence[str | None] = (None, None, None),
    store: SampleStore | None = None,
    failed: Sequence[int] = (),
) -> tuple[dict[str, float], World]:
    world: Any = World(num, ids, failed)
    validation = Validation(prompts=world, sampler=world, scorer=world, tracker=world, num_shown=shown, store=store)
    return validation.run(step=4), world


def test_one_answer_has_a_mean_alone() -> None:
    metrics, world = validate(1)
    assert metrics == pytest.approx(
        {
            "val/test_score/gsm8k": 0.5,
            "val/test_score/math": 0.0,
            "val/reward/error_rate": 0.2 / 3,  # of two samples 0, of the third 0.2
            "val/reward/format/mean": 0.5,  # one of the first two samples has 1, the third 0
            "val/reward/masked_rate": 0.0,
            "sync/check_probs_diff_mean": 0.0,
        }
    )


def test_several_answers_are_judged_together_by_data_source() -> None:
    metrics, _ = validate(4)
    assert metrics["val/test_score/gsm8k"] == metrics["val/gsm8k/mean@4"] == 0.125
    assert metrics["val/gsm8k/best@4/mean"] == 0.5
    assert metrics["val/gsm8k/best@2/mean"] == pytest.approx((3 / 6 + 0) / 2)
    assert metrics["val/test_score/math"] == metrics["val/math/mean@4"] == 0.75
    assert metrics["val/math/best@4/mean"] == 1.0
    assert metrics["val/math/best@2/mean"] == pytest.approx((5 * 1.0 + 1 * 0.5) / 6)
    assert metrics["val/math/maj@4"] == 0.5
    assert "val/gsm8k/maj@4" not in metrics  # the reward extracts no answers


def test_samples_without_a_score_are_in_no_number() -> None:
    metrics, world = validate(4, failed=[1, 6, 8, 9, 10], shown=9)
    assert metrics["val/reward/masked_rate"] == pytest.approx(5 / 12)
    assert metrics["val/test_score/gsm8k"] == metrics["val/gsm8k/mean@4"] == pytest.approx((1 / 3 + 0.0) / 2)
    assert metrics["val/gsm8k/best@2/mean"] == pytest.approx(2 / 3)  # of 1 0 0; the other prompt has one score
    assert metrics["val/math/mean@4"] == pytest.approx(2 / 3)
    assert metrics["val/math/maj@4"] == 0.5  # twice "5"; "7" has no score
    assert not [name for name in metrics if "best@4" in name]
    assert [row["score"] for row in world.tables["val/generations"]][:8] == [1.0, None, 0.0, 0.0, 0.5, 0.5, None, 1.0]


def test_data_source_without_any_score_stops_run() -> None:
    with pytest.raises(
        RewardError, match=r"no validation response of data source 'math' has a score; .*sample 4 .*timeout"
    ):
        validate(4, failed=[4, 5, 6, 7])


def test_small_last_batch_without_rewards_stops_no_run() -> None:
    metrics, _ = validate(4, failed=[8, 9, 10, 11])
    assert metrics["val/test_score/gsm8k"] == 0.25


def test_validation_with_mostly_failed_rewards_stops_run() -> None:
    message = r"5 of 8 responses have no score, more than half.*sample 0 .*sample 2 .*on_failure"
    with pytest.raises(RewardError, match=message):
        validate(4, failed=[0, 1, 2, 3, 4])


@pytest.mark.parametrize("shown", [0, 1, 3, 9])
def test_the_first_samples_of_all_batches_are_shown(shown: int) -> None:
    _, world = validate(2, shown=shown)
    rows = world.tables["val/generations"]
    assert [row["response"] for row in rows] == [f"answer {number}" for number in range(min(shown, 6))]
    assert [row["prompt"] for row in rows] == [f"question {number // 2}" for number in range(min(shown, 6))]


def test_ids_are_shown_where_prompts_have_them() -> None:
    _, world = validate(1, ids=["q1", None, "q3"])
    assert [row["prompt_id"] for row in world.tables["val/generations"]] == ["q1", None, "q3"]
    _, world = validate(1)
    assert world.tables["val/generations"][0].keys() == {"prompt", "response", "score"}


def test_samples_refused_by_full_disk_are_counted(tmp_path: Path) -> None:
    with world_of_one(), small_disk(tmp_path / "disk", 1 << 20) as disk:
        store = SampleStore(disk.path / "samples")
        assert validate(1, store=store)[0]["val/archive/failures"] == 0.0
        disk.fill()
        assert validate(1, store=store)[0]["val/archive/failures"] == 1.0
    assert "val/archive/failures" not in validate(1)[0]
