"""Samples go through a file unchanged, to the last bit."""

import errno
import json
import math
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.batch import Scored
from megarl.distributed.sharded import Sharded, Shares, shard
from megarl.platform.small_files import Damage
from megarl.samples import store
from megarl.samples.arrays import array_bytes
from megarl.samples.reading import read_rows, step_of
from megarl.samples.schema import COLUMNS, arrow_schema
from megarl.samples.store import (
    SampleStore,
    _write_share,
    is_one_step,
    steps_in,
    stored_in,
    write_samples,
)
from tests.support.kept import read_all
from tests.support.ranks import world_of_one
from tests.support.records import alone, answer, prompts


def scored(lengths: list[int], *, seed: int = 0) -> Scored:
    """Two responses to each prompt, with log-probabilities and scores that no decimal number equals."""
    generator = torch.Generator().manual_seed(seed)
    asked = prompts([3, 5][: len(lengths) // 2])
    truths: list[Any] = [{"target": 24, "numbers": [1, 2]}, "été ≤ 7"]
    ids = [None, "q-17"]
    named = [
        replace(prompt, index=70 + number, text=f"prompt {number}", ground_truth=truths[number], prompt_id=ids[number])
        for number, prompt in enumerate(asked.prompts)
    ]
    rollouts = replace(answer(asked, lengths), prompts=named)
    noise = torch.randn(rollouts.mask.shape, generator=generator)
    scores = torch.rand(len(lengths), generator=generator) / 3
    return replace(rollouts, rollout_log_probs=noise, truncated=rollouts.num_tokens > 2).extend(
        Scored, texts=[f"text {number}" for number in range(len(lengths))], scores=scores, accuracies=scores + 1
    )


def as_episodes(record: Scored) -> Scored:
    """Return the record with two tokens of an environment in its third sample."""
    observed = torch.zeros_like(record.mask)
    record.pieces(observed)[2][1:3] = True
    said = record.mask & ~observed
    return replace(
        record,
        mask=said,
        rollout_log_probs=-1.0 * said,
        turn_rewards=torch.rand(said.shape) * said,
        num_turns=torch.tensor([1, 1, 2, 1]),
        stop_reasons=["done", "turns", "done", "timeout"],
        faults=[None, None, None, "it took too long"],
    )


def routes_of(record: Scored) -> torch.Tensor:
    """Return routes of two layers and two of many experts, with other numbers in all places."""
    return torch.arange(4 * int(record.num_places().sum()), dtype=torch.int16).view(-1, 2, 2)


def assert_same(one: Scored, other: Scored) -> None:
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def test_prompts_of_other_replicas_are_not_read(tmp_path: Path) -> None:
    unread: Any = None
    record = scored([2, 1, 3, 4])
    write_samples(tmp_path / "all.parquet", record, None, step=1)
    numbers = replace(record, prompts=[unread, *record.prompts, unread], groups=record.groups + 1)
    write_samples(tmp_path / "some.parquet", numbers, None, step=1)
    one, other = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("all", "some"))
    assert one.drop_columns(["group"]).equals(other.drop_columns(["group"]))


def test_a_record_comes_back_bit_for_bit(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "step_7.parquet", record, None, step=7)
    found, baselines = read_all(tmp_path / "step_7.parquet")
    assert_same(found, record)
    assert baselines is None


def test_prompts_are_repeated_in_parts(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    with patch.object(store, "PART_BYTES", 40):
        assert [len(part) for part in store._table(record, None, step=7)["prompt"].chunks] == [1, 1, 1, 1]
        write_samples(tmp_path / "step_7.parquet", record, None, step=7)
    assert_same(read_all(tmp_path / "step_7.parquet")[0], record)


def test_routes_come_back_with_type_and_shape(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    record = replace(record, routes=routes_of(record))
    write_samples(tmp_path / "step_7.parquet", record, None, step=7)
    assert_same(read_all(tmp_path / "step_7.parquet")[0], record)


@pytest.mark.parametrize("array", [b"", b"no array", torch.zeros(3, 2, 2), torch.zeros(1), None])
def test_arrays_that_are_no_routes_are_named(tmp_path: Path, array: Any) -> None:
    path, table = kept(tmp_path)
    content = array_bytes(array) if isinstance(array, torch.Tensor) else array
    if content is None:
        content = table["routes"][1].as_py()  # of a sample of another length
    assert "column routes" in read_spoilt(path, column_of(table, "routes", 2, content))


def test_samples_replace_earlier_ones_only_if_allowed(tmp_path: Path) -> None:
    first, second = scored([2, 1, 4, 3]), scored([2, 1, 4, 3], seed=1)
    with world_of_one():
        for store, record, found in (
            (SampleStore(tmp_path, replaces=False), first, first),
            (SampleStore(tmp_path, replaces=False), second, first),
            (SampleStore(tmp_path), second, second),
        ):
            store.save_validation(alone(record), step=3)
            assert_same(read_all(tmp_path / "val_step_3.parquet")[0], found)


PARTS = ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"]


def keep_parts(directory: Path, record: Scored, owners: list[int], baselines: torch.Tensor | None = None) -> Path:
    """Keep the samples of step 7 as the ranks of two replicas do together."""
    first, second = (shard(record, torch.tensor(owners), Shares(ranks=((0,), (1,)), rank=rank)) for rank in range(2))

    def write_both(path: Path, samples: Sharded[Scored], *others: Any, **settings: Any) -> None:
        for one in (first, second):
            _write_share(path, one, *others, **settings)

    with world_of_one(), patch.object(store, "_write_share", write_both):
        assert SampleStore(directory).save_step(first, baselines, step=7)
    return directory / "step_7.parquet"


@pytest.mark.parametrize("owners", [[1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1]])  # in the end, one has no samples
def test_parts_of_several_replicas_come_back_in_order(tmp_path: Path, owners: list[int]) -> None:
    record, baselines = as_episodes(scored([2, 1, 4, 3])), torch.rand(4) / 3
    path = keep_parts(tmp_path, record, owners, baselines)
    assert sorted(part.name for part in path.iterdir()) == PARTS
    found, found_baselines = read_all(path)
    assert_same(found, record)
    assert found_baselines is not None
    assert torch.equal(found_baselines, baselines)
    assert (steps_in(tmp_path), step_of(path)) == ({7: path}, 7)
    assert is_one_step(path) and not is_one_step(tmp_path)


def test_other_programs_read_directory_of_parts(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    record = scored([2, 1, 4, 3])
    rows = pandas.read_parquet(keep_parts(tmp_path, record, [1, 0, 0, 1])).sort_values("sample")
    assert rows["response"].tolist() == record.texts
    assert rows["response_ids"].map(list).sum() == record.responses.tolist()


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    path = keep_parts(tmp_path, scored([2, 1, 4, 3]), [1, 0, 0, 1])
    (path / part).unlink()
    with pytest.raises(Damage, match=f"^{path} cannot be read as samples of a run: it has no {part}$"):
        read_all(path)


@pytest.mark.parametrize(("name", "parts"), [("score", PARTS[:1]), ("sample", PARTS[1:]), ("sample", PARTS)])
def test_parts_without_a_column_are_damage(tmp_path: Path, name: str, parts: list[str]) -> None:
    path = keep_parts(tmp_path, scored([2, 1, 4, 3]), [1, 0, 0, 1])
    for part in parts:
        pq.write_table(pq.read_table(path / part).drop_columns([name]), path / part)
    with pytest.raises(Damage, match="samples of a run: its files have no column 'sample', or different columns"):
        read_all(path)


def test_samples_of_other_replica_count_are_replaced(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    one, first_of_two = alone(record), shard(record, torch.tensor([0, 0, 1, 1]), Shares(ranks=((0,), (1,))))
    with world_of_one():
        for samples, is_directory in ((one, False), (first_of_two, True), (first_of_two, True), (one, False)):
            assert SampleStore(tmp_path).save_validation(samples, step=3)
            [path] = tmp_path.iterdir()
            assert (path.name, path.is_dir()) == ("val_step_3.parquet", is_directory)
    assert_same(read_all(path)[0], record)


def test_leftover_of_killed_job_hinders_no_replacement(tmp_path: Path) -> None:
    two = shard(scored([2, 1, 4, 3]), torch.tensor([0, 0, 1, 1]), Shares(ranks=((0,), (1,))))
    with world_of_one():
        assert SampleStore(tmp_path).save_step(two, None, step=3)
        shutil.copytree(tmp_path / "step_3.parquet", tmp_path / ".step_3.parquet.old")
        assert SampleStore(tmp_path).save_step(two, None, step=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3.parquet"]


@pytest.mark.parametrize("function", ["rmdir", "unlink"])
def test_samples_are_kept_if_disk_removes_nothing(tmp_path: Path, function: str) -> None:
    """A network file system keeps a directory while another program reads one of its files."""
    record = scored([2, 1, 4, 3])
    one, two = alone(record), shard(record, torch.tensor([0, 0, 0, 0]), Shares(ranks=((0,), (1,))))
    with world_of_one(), patch.object(os, function, side_effect=OSError(errno.EBUSY, "busy")):
        for samples in (two, one):
            assert SampleStore(tmp_path).save_validation(samples, step=3)
    assert list(stored_in(tmp_path)) == ["val_step_3"]


@pytest.mark.parametrize("num_shares", [1, 2])
def test_samples_have_their_name_when_complete(tmp_path: Path, num_shares: int) -> None:
    """A disk that is full, or a job that is killed, leaves what was kept before."""
    shares = Shares(ranks=((0,), (1,))[:num_shares])
    first, second = (shard(scored([2, 1, 4, 3], seed=seed), torch.zeros(4).long(), shares) for seed in range(2))
    with world_of_one():
        assert SampleStore(tmp_path).save_step(first, None, step=7)
        kept_first = read_files(tmp_path)
        with patch.object(store, "publish", side_effect=OSError(errno.ENOSPC, "full")):
            assert not SampleStore(tmp_path).save_step(second, None, step=7)
        assert read_files(tmp_path) == kept_first
        assert list(stored_in(tmp_path)) == ["step_7"]
        assert SampleStore(tmp_path).save_step(second, None, step=7)
        assert [path.name for path in tmp_path.iterdir()] == ["step_7.parquet"]
        assert read_files(tmp_path) != kept_first


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the content of all files that are not hidden."""
    files = [path for path in directory.rglob("[!.]*") if path.is_file() and path.parent.name[0] != "."]
    return {path.name: path.read_bytes() for path in files}


def test_record_without_its_longest_response_comes_back(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3]).select(torch.tensor([0, 1, 3]))
    write_samples(tmp_path / "file", record, None, step=1)
    found, _ = read_all(tmp_path / "file")
    assert found.num_tokens.tolist() == [2, 1, 3]
    assert_same(found, record)


def test_width_in_file_of_earlier_version_is_ignored(tmp_path: Path) -> None:
    path, table = kept(tmp_path)
    expected, _ = read_all(path)
    for width in (b"4", b"9", b"3", b"-1", b"x", b"9" * 5000):
        pq.write_table(table.replace_schema_metadata({b"megarl.width": width}), path)
        assert_same(read_all(path)[0], expected)


def test_parquet_rows_are_readable_and_may_be_omitted(tmp_path: Path) -> None:
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
    half, _ = read_all(tmp_path / "half")
    assert half.groups.tolist() == [0, 0]
    assert half.num_tokens.tolist() == [4, 3]
    assert [prompt.index for prompt in half.prompts] == [71]


def test_log_probs_answers_and_baselines_are_optional(tmp_path: Path) -> None:
    record, baselines = replace(scored([2, 1, 4, 3]), rollout_log_probs=None), torch.rand(4) / 3
    record = replace(record, answers=["7", None, "", "8"])
    write_samples(tmp_path / "file", record, baselines, step=1)
    found, found_baselines = read_all(tmp_path / "file")
    assert_same(found, record)
    assert found_baselines is not None
    assert torch.equal(found_baselines, baselines)


def test_sample_without_score_is_stored_with_reason(tmp_path: Path) -> None:
    record = replace(scored([2, 1, 4, 3]), failures=[None, "it took too long", None, None])
    nan = torch.tensor([0.0, math.nan, 0.0, 0.0])
    record = replace(record, scores=record.scores + nan, accuracies=record.accuracies + nan)
    baselines = torch.rand(4) + nan
    write_samples(tmp_path / "file", record, baselines, step=1)
    found, found_baselines = read_all(tmp_path / "file")
    for one, other in (
        (found.scores, record.scores),
        (found.accuracies, record.accuracies),
        (found_baselines, baselines),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    judged, rows = record.has_score().nonzero()[:, 0], pq.read_table(tmp_path / "file").to_pylist()
    assert found.failures == record.failures
    assert_same(found.select(judged), record.select(judged))
    assert [(row["score"] is None, row["failure"]) for row in rows[:2]] == [(False, None), (True, "it took too long")]

    without = [row | {"failure": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(without, arrow_schema(COLUMNS)), tmp_path / "damaged")
    with pytest.raises(Damage, match="column score: a row has neither a number nor a failure, or both"):
        read_all(tmp_path / "damaged")


def test_an_episode_is_kept_with_its_turns(tmp_path: Path) -> None:
    record = as_episodes(scored([2, 1, 4, 3]))
    write_samples(tmp_path / "file", record, None, step=1)
    found, _ = read_all(tmp_path / "file")
    assert_same(found, record)
    rows = [row | {"num_turns": None} for row in pq.read_table(tmp_path / "file").to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, arrow_schema(COLUMNS)), tmp_path / "damaged")
    with pytest.raises(Damage, match="column num_turns and column observed: one is null"):
        read_all(tmp_path / "damaged")


def test_the_iterations_in_a_directory(tmp_path: Path) -> None:
    for name in ("step_2", "step_10", "val_step_3", "step_new", ".step_4"):
        write_samples(tmp_path / f"{name}.parquet", scored([1, 1]), None, step=9)
    assert list(steps_in(tmp_path).items()) == [(step, tmp_path / f"step_{step}.parquet") for step in (2, 10)]
    assert step_of(tmp_path / "val_step_3.parquet") == 9  # a file may have been renamed


def test_failed_write_keeps_previous_file(tmp_path: Path) -> None:
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "file", record, None, step=1)
    with pytest.raises(TypeError):
        write_samples(tmp_path / "file", replace(record, texts=[3, 3, 3, 3]), None, step=1)  # type: ignore[list-item]
    assert_same(read_all(tmp_path / "file")[0], record)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothere.parquet is missing"):
        read_all(tmp_path / "nothere.parquet")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="text cannot be read as samples"):
        read_all(tmp_path / "text")
    record = scored([2, 1, 4, 3])
    write_samples(tmp_path / "file", record, None, step=1)
    pq.write_table(pq.read_table(tmp_path / "file").drop_columns(["score"]), tmp_path / "other")
    with pytest.raises(ValueError, match="other cannot be read as samples of a run: it has no column 'score'"):
        read_all(tmp_path / "other")


def column_of(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """The table with another value in one place."""
    values = table[name].to_pylist()
    values[row] = value
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


NEVER_NULL = [name for name, column in COLUMNS.items() if column.null in ("never", "in all rows or none")]
TOKEN_COLUMNS = [name for name, column in COLUMNS.items() if pa.types.is_list(column.type)]


def kept(directory: Path) -> tuple[Path, pa.Table]:
    """A file with every column and no null value."""
    record = scored([2, 1, 4, 3])
    versions = torch.zeros(record.mask.shape, dtype=torch.int32)
    record = replace(
        as_episodes(record), answers=["7", "", "5", "8"], weight_versions=versions, routes=routes_of(record)
    )
    write_samples(directory / "step_1.parquet", record, torch.rand(4), step=1)
    return directory / "step_1.parquet", pq.read_table(directory / "step_1.parquet")


def read_spoilt(path: Path, table: pa.Table) -> str:
    """Return the message about a file with this table."""
    pq.write_table(table, path)
    with pytest.raises(Damage) as damage:
        read_all(path)
    assert str(damage.value).startswith(f"{path} ")
    return str(damage.value)


@pytest.mark.parametrize("name", NEVER_NULL)
def test_a_null_is_named_by_its_column(tmp_path: Path, name: str) -> None:
    path, table = kept(tmp_path)
    assert f"column {name}: it is null in 1 of 4 rows" in read_spoilt(path, column_of(table, name, 2, None))


@pytest.mark.parametrize("name", TOKEN_COLUMNS)
def test_null_in_number_column_is_named_by_column(tmp_path: Path, name: str) -> None:
    path, table = kept(tmp_path)
    spoilt = [*table[name][2].as_py()[:-1], None]
    assert f"column {name}: a number is null" in read_spoilt(path, column_of(table, name, 2, spoilt))


@pytest.mark.parametrize("name", COLUMNS)
def test_another_type_is_named_by_its_column(tmp_path: Path, name: str) -> None:
    path, table = kept(tmp_path)
    place = table.schema.get_field_index(name)
    for other in (pa.int16(), pa.float64(), pa.binary(), pa.list_(pa.float64()), pa.null()):
        if other == table.schema.field(place).type:
            continue
        spoilt = table.set_column(place, name, pa.nulls(4, other))
        assert f"column {name} has the type {str(other)[:4]}" in read_spoilt(path, spoilt)
    assert f"it has no column '{name}'" in read_spoilt(path, table.drop_columns([name]))
    assert f"it has 2 columns '{name}'" in read_spoilt(path, table.append_column(name, table[name]))


@given(lengths=st.lists(st.integers(0, 5), min_size=4, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_log_probs_of_wrong_length_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    path, table = kept(tmp_path)
    place = table.schema.get_field_index("rollout_log_probs")
    values = pa.array([[-1.0] * length for length in lengths], pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, table.schema.field(place), values), path)
    right = [2, 1, 4, 3]
    if lengths == right:
        read_all(path)
    else:
        with pytest.raises(Damage, match="column rollout_log_probs: its lists are not as long as the responses"):
            read_all(path)


def test_invalid_groups_steps_and_ground_truths_are_named(tmp_path: Path) -> None:
    path, table = kept(tmp_path)
    for name, row, value, said in (
        ("group", 3, 0, "column group: the samples of a group are not next to each other"),
        ("step", 2, 7, "column step: the samples are of several steps"),
        ("ground_truth", 0, "{", "is damaged: Expecting property name"),
    ):
        assert said in read_spoilt(path, column_of(table, name, row, value))
    assert "it has no samples" in read_spoilt(path, table.slice(0, 0))


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bit_in_file_is_detected_or_harmless(tmp_path: Path, place: float, bit: int) -> None:
    path, _ = kept(tmp_path)
    expected, content = read_all(path)[0], bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        found, _ = read_all(path)
    except Damage as damage:
        assert str(damage).startswith(f"{path} ")
    else:
        for name in ("num_tokens", "responses", "scores"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def test_pipe_in_place_of_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_1.parquet")
    with pytest.raises(Damage, match="something else is in the place"):
        read_all(tmp_path / "step_1.parquet")


def test_rows_of_all_files_in_order(tmp_path: Path) -> None:
    for step, name in ((10, "step_10"), (2, "step_2"), (2, "val_step_2"), (3, "other_step_3"), (3, "step_x")):
        write_samples(tmp_path / f"{name}.parquet", scored([1, 1]), None, step=step)
    assert list(stored_in(tmp_path)) == ["step_2", "val_step_2", "step_10"]
    record = as_episodes(scored([2, 1, 4, 3]))
    write_samples(tmp_path / "step_4.parquet", record, None, step=4)
    rows = read_rows(stored_in(tmp_path)["step_4"])
    assert [row["response"] for row in rows] == record.texts
    assert [sum(row["observed"]) for row in rows] == [0, 0, 2, 0]
    assert stored_in(tmp_path / "nowhere") == {}
