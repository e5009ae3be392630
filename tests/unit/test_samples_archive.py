"""Samples go through a file unchanged, to the last bit."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megarl.batch import Scored
from megarl.samples.archive import Archive, read_samples, step_of, steps_in, write_samples
from tests.ranks import world_of_one
from tests.records import answer, prompts


def scored(lengths: list[int], *, seed: int = 0) -> Scored:
    """Two answers to each prompt, with log-probabilities and scores that no decimal number is equal to."""
    generator = torch.Generator().manual_seed(seed)
    asked = prompts([3, 5][: len(lengths) // 2])
    truths: list[Any] = [{"target": 24, "numbers": [1, 2]}, "été ≤ 7"]
    ids = [None, "q-17"]
    named = [
        replace(prompt, index=70 + number, text=f"prompt {number}", ground_truth=truths[number], prompt_id=ids[number])
        for number, prompt in enumerate(asked.prompts)
    ]
    rollouts = replace(answer(asked, lengths), prompts=named)
    noise = torch.randn(rollouts.mask.shape, generator=generator) * rollouts.mask
    scores = torch.rand(len(lengths), generator=generator) / 3
    return replace(rollouts, rollout_log_probs=noise, truncated=rollouts.mask.sum(-1) > 2).extend(
        Scored, texts=[f"text {number}" for number in range(len(lengths))], scores=scores, accuracies=scores + 1
    )


def assert_same(one: Scored, other: Scored) -> None:
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def test_a_record_comes_back_bit_for_bit(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "step_7.parquet", record, None, step=7)
    found, baselines = read_samples(tmp_path / "step_7.parquet")
    assert_same(found, record)
    assert baselines is None


def test_samples_take_the_place_of_earlier_ones_only_where_they_may(tmp_path: Path) -> None:
    first, second = scored([2, 1, 4, 3]), scored([2, 1, 4, 3], seed=1)
    with world_of_one():
        for archive, record, found in (
            (Archive(tmp_path, replaces=False), first, first),
            (Archive(tmp_path, replaces=False), second, first),
            (Archive(tmp_path), second, second),
        ):
            archive.keep_validation(record, step=3)
            assert_same(read_samples(tmp_path / "val_step_3.parquet")[0], found)


def test_its_width_may_be_more_than_its_longest_response(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3]).select(torch.tensor([0, 1, 3]))
    write_samples(tmp_path / "file", record, None, step=1)
    found, _ = read_samples(tmp_path / "file")
    assert found.mask.shape == (3, 4)
    assert_same(found, record)


def test_rows_can_be_read_by_anybody_and_left_out(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "file", record, None, step=7)
    table = pq.read_table(tmp_path / "file")
    first, *_, last = table.to_pylist()
    assert (first["step"], first["group"], first["index"], first["prompt"]) == (7, 0, 70, "prompt 0")
    assert json.loads(last["ground_truth"]) == "été ≤ 7"
    assert (last["response"], last["response_ids"], last["prompt_ids"]) == (
        "text 3",
        [40, 41, 42],
        list(range(200, 205)),
    )
    assert last["truncated"]
    pq.write_table(table.slice(2).replace_schema_metadata(None), tmp_path / "half")
    half, _ = read_samples(tmp_path / "half")
    assert half.groups.tolist() == [0, 0]
    assert half.mask.shape == (2, 4)
    assert [prompt.index for prompt in half.prompts] == [71]


def test_log_probabilities_answers_and_baselines_may_be_there_or_not(tmp_path: Path) -> None:
    record, baselines = replace(scored([2, 1, 4, 3]), rollout_log_probs=None), torch.rand(4) / 3
    record = replace(record, answers=["7", None, "", "8"])
    write_samples(tmp_path / "file", record, baselines, step=1)
    found, found_baselines = read_samples(tmp_path / "file")
    assert_same(found, record)
    assert found_baselines is not None
    assert torch.equal(found_baselines, baselines)


def test_a_sample_without_a_score_is_kept_with_the_reason(tmp_path: Path) -> None:
    record = replace(scored([2, 1, 4, 3]), failures=[None, "it took too long", None, None])
    nan = torch.tensor([0.0, math.nan, 0.0, 0.0])
    record = replace(record, scores=record.scores + nan, accuracies=record.accuracies + nan)
    baselines = torch.rand(4) + nan
    write_samples(tmp_path / "file", record, baselines, step=1)
    found, found_baselines = read_samples(tmp_path / "file")
    for one, other in (
        (found.scores, record.scores),
        (found.accuracies, record.accuracies),
        (found_baselines, baselines),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    judged, rows = record.judged().nonzero()[:, 0], pq.read_table(tmp_path / "file").to_pylist()
    assert found.failures == record.failures
    assert_same(found.select(judged), record.select(judged))
    assert [(row["score"] is None, row["failure"]) for row in rows[:2]] == [(False, None), (True, "it took too long")]

    without = [row | {"failure": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(without), tmp_path / "damaged")
    with pytest.raises(ValueError, match="damaged has samples with neither a score nor a failure, or with both"):
        read_samples(tmp_path / "damaged")


@pytest.mark.parametrize("swapped", [(0, 2), (1, None)])
def test_log_probabilities_of_other_tokens_are_damage(swapped: tuple[int, int | None], tmp_path: Path) -> None:
    write_samples(tmp_path / "file", scored([2, 1, 4, 3]), None, step=1)
    rows = pq.read_table(tmp_path / "file").to_pylist()
    one, other = swapped
    if other is None:
        rows[one]["rollout_log_probs"] = None
    else:
        for row, number in ((one, other), (other, one)):
            rows[row]["rollout_log_probs"] = [-1.0] * len(rows[number]["response_ids"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "damaged")
    with pytest.raises(ValueError, match="damaged has samples with more or fewer log-probabilities than tokens"):
        read_samples(tmp_path / "damaged")


def test_the_iterations_in_a_directory(tmp_path: Path) -> None:
    for name in ("step_2", "step_10", "val_step_3", "step_new", ".step_4"):
        write_samples(tmp_path / f"{name}.parquet", scored([1, 1]), None, step=9)
    assert list(steps_in(tmp_path).items()) == [(step, tmp_path / f"step_{step}.parquet") for step in (2, 10)]
    assert step_of(tmp_path / "val_step_3.parquet") == 9  # a file may have been renamed


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "file", record, None, step=1)
    with pytest.raises(TypeError):
        write_samples(tmp_path / "file", replace(record, texts=[3, 3, 3, 3]), None, step=1)  # type: ignore[list-item]
    assert_same(read_samples(tmp_path / "file")[0], record)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothere.parquet cannot be read as samples"):
        read_samples(tmp_path / "nothere.parquet")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="text cannot be read as samples"):
        read_samples(tmp_path / "text")
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "file", record, None, step=1)
    pq.write_table(pq.read_table(tmp_path / "file").drop_columns(["score"]), tmp_path / "other")
    with pytest.raises(ValueError, match="other has no column 'score'"):
        read_samples(tmp_path / "other")
