"""The files of complete responses: their content, the steps and configurations that they are for, and damage."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.batch import Generation, Group, Prompt, float32, int32
from megarl.checkpoint.directory import STATE_FILE
from megarl.distributed.sharded import Shares
from megarl.samples.step_cache import KEPT, StepCache


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prompt(row: int) -> Prompt:
    return Prompt(index=row, token_ids=[row, row], text="", data_source="", ground_truth=None, extra_info={})


def group(row: int, *, token: int | None = None) -> Group:
    """Return the group of a row of the data; `token` is the first of its prompt instead of the row's number."""
    asked = prompt(row) if token is None else replace(prompt(row), token_ids=[token, row])
    tokens, log_probs, versions = int32([row, 7]), float32([-0.5, -1.5]), int32([3, 3])
    sample = Generation(0, tokens, log_probs, truncated=False, weight_versions=versions)
    return Group(prompt=asked, samples=(sample, replace(sample, sample=1)), started=3)


ASKED = [group(row) for row in range(10)]  # of the step, by number


def kept(run_dir: Path, *, config: str = "a config") -> StepCache:
    def checkpoint_of(step: int) -> Path | None:
        return run_dir / f"global_step_{step}" if step else None

    return StepCache(run_dir, config=config, checkpoint_of=checkpoint_of, shares=Shares())


def save(run_dir: Path, step: int, state: str = "{}") -> None:
    (run_dir / f"global_step_{step}").mkdir(exist_ok=True)
    (run_dir / f"global_step_{step}" / STATE_FILE).write_text(state)


def test_another_job_finds_what_was_kept(tmp_path: Path) -> None:
    save(tmp_path, 3)
    first = kept(tmp_path)
    assert first.begin(3, ASKED) == {}
    first.write({5: group(5), 8: group(8)})
    first.write({})
    first.write({2: group(2)})
    second = kept(tmp_path)
    assert second.begin(3, ASKED) == {row: group(row) for row in (5, 8, 2)}
    second.write({9: group(9)})
    assert kept(tmp_path).begin(3, ASKED).keys() == {5, 8, 2, 9}


def test_a_start_without_a_checkpoint_keeps_too(tmp_path: Path) -> None:
    first = kept(tmp_path)
    first.begin(0, ASKED)
    first.write({5: group(5)})
    assert kept(tmp_path).begin(0, ASKED) == {5: group(5)}


def test_a_step_without_a_checkpoint_keeps_nothing(tmp_path: Path) -> None:
    first = kept(tmp_path)
    first.begin(4, ASKED)
    first.write({5: group(5)})
    assert not (tmp_path / KEPT).exists()


@pytest.mark.parametrize("change", ["config", "checkpoint", "step", "prompts"])
def test_what_follows_from_something_else_is_removed(tmp_path: Path, change: str) -> None:
    save(tmp_path, 3)
    first = kept(tmp_path)
    first.begin(3, ASKED)
    first.write({5: group(5)})
    if change == "checkpoint":
        save(tmp_path, 3, state="another")
    other = kept(tmp_path, config="another config" if change == "config" else "a config")
    asked = [group(row, token=77) for row in range(10)] if change == "prompts" else ASKED
    assert other.begin(2 if change == "step" else 3, asked) == {}
    assert not [*(tmp_path / KEPT).iterdir()]


def test_responses_of_damaged_file_are_generated_again(tmp_path: Path) -> None:
    first = kept(tmp_path)
    first.begin(0, ASKED)
    first.write({5: group(5)})
    first.write({8: group(8)})
    [file, _] = sorted((tmp_path / KEPT).rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-9])
    assert kept(tmp_path).begin(0, ASKED) == {8: group(8)}


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    first = kept(tmp_path)
    first.begin(0, ASKED)
    first.write({5: group(5)})
    [file] = (tmp_path / KEPT).rglob("*.parquet")
    for name in ("00000-0 (copy).parquet", "notes.parquet"):
        file.with_name(name).write_bytes(file.read_bytes())
    second = kept(tmp_path)
    assert second.begin(0, ASKED) == {5: group(5)}
    second.write({8: group(8)})
    assert kept(tmp_path).begin(0, ASKED).keys() == {5, 8}


def test_full_disk_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = kept(tmp_path)
    cache.begin(0, ASKED)
    (tmp_path / KEPT).write_text("a file in the place of the directory")
    for row in (5, 8):
        cache.write({row: group(row)})
    [warning] = caplog.messages
    assert "training continues" in warning and "a file is in the place of the directory" in warning


def test_group_with_missing_sample_is_drawn_again(tmp_path: Path) -> None:
    first = kept(tmp_path)
    first.begin(0, ASKED)
    first.write({5: replace(group(5), samples=group(5).samples[:1]), 8: group(8)})
    assert kept(tmp_path).begin(0, ASKED) == {8: group(8)}
