"""Checkpoints on disk: complete or absent, whenever the process dies."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel

from megarl.checkpoint.background import run_blocking
from megarl.checkpoint.contents import RANDOM_STATES
from megarl.checkpoint.directory import LATEST_FILE, MANIFEST_FILE, saved_steps, set_aside
from megarl.checkpoint.failures import SMALL_BYTES, warn_of_space
from megarl.checkpoint.find import find_checkpoint
from megarl.checkpoint.manifest import listed, sealing
from megarl.checkpoint.occupancy import tidy_up
from megarl.checkpoint.state import Best, State
from megarl.checkpoint.store import CheckpointStore
from megarl.commands.export import intact_checkpoint
from megarl.data.order import Position
from megarl.learner.randomness import write_random_states
from megarl.platform.small_files import Damage
from megarl.samples.in_flight import IN_FLIGHT_FILE, IN_FLIGHT_FILES
from tests.support.checkpoint_models import ConfigOnly
from tests.support.disks import small_disk

pytestmark = pytest.mark.usefixtures("world")


def checkpoints(directory: Path, *, keep: int | None = 2, is_async: bool = False) -> CheckpointStore:
    """Return the checkpoints of a run without models."""
    return CheckpointStore(
        directory=directory,
        learners={},
        keep=keep,
        models=[ConfigOnly()],
        is_async=is_async,
    )


def found(directory: Path) -> Path | None:
    return find_checkpoint(directory, mode="auto", path=None)


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_a_saved_checkpoint_is_found_and_loaded(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "run")
    torch.manual_seed(3)
    groups, of_group = tensor_parallel.get_cuda_rng_tracker(), torch.arange(16, dtype=torch.uint8)
    groups.set_states({"model-parallel-rng": of_group})
    state = State(step=4, kl_coef=0.25, position=Position(1, 24), best=Best(0.1, 3), metrics={"actor/lr": 1 / 3})
    run.save(state)
    drawn = torch.rand(5)
    groups.set_states({"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)})
    checkpoint = found(tmp_path / "run")
    assert checkpoint == tmp_path / "run" / "global_step_4"
    assert (checkpoint / "huggingface" / "config.json").is_file()
    assert run.load(checkpoint) == state
    assert torch.equal(torch.rand(5), drawn)  # the generators continue from their saved states
    assert torch.equal(groups.get_states()["model-parallel-rng"], of_group)


def test_foreign_files_of_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    """A copy over a checkpoint of the same step and more replicas leaves files of that one."""
    names = [IN_FLIGHT_FILE.format(replica) for replica in range(3)]
    checkpoints(tmp_path).save(State(step=4, files=dict.fromkeys(names[:2], b"responses")))
    (tmp_path / "global_step_4" / names[2]).write_bytes(b"of another past")
    checkpoint = found(tmp_path)
    assert checkpoint == tmp_path / "global_step_4"
    assert listed(checkpoint, IN_FLIGHT_FILES) == [checkpoint / name for name in names[:2]]
    (checkpoint / MANIFEST_FILE).write_text("{}")
    with pytest.raises(Damage, match="does not list"):
        listed(checkpoint, IN_FLIGHT_FILES)


def test_old_state_without_optional_fields_is_readable(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 3, "kl_coef": 0.1}')
    assert State.read(tmp_path) == State(step=3, kl_coef=0.1)


def test_the_first_of_the_best_is_remembered() -> None:
    first = Best(0.5, 2).or_better(None)
    assert Best(0.5, 4).or_better(first) == Best(0.4, 4).or_better(first) == first
    assert Best(0.6, 4).or_better(first) == Best(0.6, 4)


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        checkpoints(tmp_path).save(State(step=step, kl_coef=0.0))
    assert steps(tmp_path) == ["global_step_10", "global_step_11"]
    checkpoints(tmp_path, keep=None).save(State(step=12, kl_coef=0.0))
    assert steps(tmp_path) == ["global_step_10", "global_step_11", "global_step_12"]


def test_unremovable_old_checkpoint_does_not_fail_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, first = checkpoints(tmp_path, keep=1), tmp_path / "global_step_1"
    with small_disk(first, 1 << 20):  # a mount point can be neither renamed nor removed
        (first / "state.json").write_text("{}")
        for step in (2, 3):
            run.save(State(step=step))
        run.close()
        assert run.advance() == {}
        assert found(tmp_path) == tmp_path / "global_step_3"
        assert steps(tmp_path) == ["global_step_1", "global_step_3"]
        assert f"the old checkpoint {first} cannot be removed: {first}: Device or resource busy" in caplog.text


def test_half_removed_checkpoint_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints(tmp_path).save(State(step=1))
    rmtree = shutil.rmtree

    def die(path: Path, ignore_errors: bool = False) -> None:
        if ignore_errors:
            return rmtree(path, ignore_errors=True)
        (path / "state.json").rename(path / "half removed")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", die)
        checkpoints(tmp_path, keep=1).save(State(step=2))
    assert steps(tmp_path) == [".global_step_1.part", "global_step_2"]
    assert found(tmp_path) == tmp_path / "global_step_2"
    tidy_up(tmp_path)
    assert steps(tmp_path) == ["global_step_2"]


def test_unremovable_unfinished_files_do_not_block_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / ".global_step_1.part", 1 << 20) as disk:
        tidy_up(tmp_path)
    assert f"{disk.path}, left unfinished by a job that died, cannot be removed" in caplog.text


def test_other_names_and_links_are_not_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 7)
    for name in ("007", "7.bak", "\u0663", os.fsdecode(b"\xff")):
        shutil.copytree(tmp_path / "global_step_7", tmp_path / f"global_step_{name}")
    (tmp_path / "global_step_8").symlink_to(tmp_path / "global_step_7")
    assert saved_steps(tmp_path) == [7]


def test_checkpoints_moved_in_one_second_do_not_collide(tmp_path: Path) -> None:
    for step in (3, 7):
        write_checkpoint(tmp_path, step)
        set_aside(tmp_path, [step], latest=None)
    assert [path.name for path in sorted(tmp_path.glob("set_aside-*/global*"))] == ["global_step_3", "global_step_7"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fault", ["write_config", "rename", "fsync"])
def test_a_crash_while_saving_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, is_async: bool
) -> None:
    run = checkpoints(tmp_path, is_async=is_async)
    run.save(State(step=1, kl_coef=0.5))
    run.close()

    def crash(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        if fault == "write_config":
            patch.setattr(ConfigOnly, "write_config", crash)
        elif fault == "rename":
            patch.setattr(Path, "rename", crash)
        else:
            patch.setattr("os.fsync", crash)
        run.save(State(step=2, kl_coef=0.6))
        run.close()
    checkpoint = found(tmp_path)
    assert checkpoint == tmp_path / "global_step_1"
    assert checkpoints(tmp_path).load(checkpoint) == State(step=1, kl_coef=0.5)

    checkpoints(tmp_path).save(State(step=2, kl_coef=0.7))  # the files that the crash left do no harm
    assert State.read(tmp_path / "global_step_2") == State(step=2, kl_coef=0.7)
    assert steps(tmp_path) == ["global_step_1", "global_step_2"]


class Killed(BaseException):
    """The end of the process: no code handles it."""


@pytest.mark.parametrize("dies_before_rename", [1, 2])
def test_crash_during_replacement_leaves_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_before_rename: int
) -> None:
    for step in (1, 2):
        checkpoints(tmp_path).save(State(step=step, kl_coef=0.5))
    calls = 0
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == dies_before_rename:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", crash)
        checkpoints(tmp_path).save(
            State(step=2, kl_coef=0.9)
        )  # the run has resumed from step 1 and reaches step 2 again
    checkpoint = found(tmp_path)
    assert checkpoint is not None
    step = checkpoints(tmp_path).load(checkpoint).step
    assert step == {1: 2, 2: 1}[dies_before_rename]
    checkpoints(tmp_path).save(State(step=2, kl_coef=0.9))
    assert State.read(tmp_path / "global_step_2").kl_coef == 0.9
    assert steps(tmp_path) == ["global_step_1", "global_step_2"]


def test_asynchronous_save_becomes_latest_when_complete(tmp_path: Path) -> None:
    run = checkpoints(tmp_path, is_async=True)
    run.save(State(step=1, kl_coef=0.5))
    assert found(tmp_path) is None
    run.advance()
    run.save(State(step=2, kl_coef=0.6))  # the one before is finished first
    assert found(tmp_path) == tmp_path / "global_step_1"
    run.close()
    assert found(tmp_path) == tmp_path / "global_step_2"
    run.close()  # nothing is under way


def write_checkpoint(directory: Path, step: int) -> Path:
    checkpoint = directory / f"global_step_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(asdict(State(step=step))))
    write_random_states(checkpoint / RANDOM_STATES)
    run_blocking(sealing(checkpoint))
    return checkpoint


def test_resume_modes(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    assert found(tmp_path / "nothere") is None
    checkpoint = write_checkpoint(tmp_path, 3)
    assert found(tmp_path) == checkpoint  # after a crash before the pointer was written, or a copy without it
    (tmp_path / LATEST_FILE).write_text("3\n")
    assert found(tmp_path) == checkpoint
    assert find_checkpoint(tmp_path, mode="disable", path=None) is None
    elsewhere = write_checkpoint(tmp_path / "elsewhere", 8)
    assert find_checkpoint(tmp_path, mode="resume_path", path=str(elsewhere)) == elsewhere
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path=.*elsewhere is not a checkpoint"):
        find_checkpoint(tmp_path, mode="resume_path", path=str(elsewhere.parent))


def test_the_pointer_names_the_checkpoint_to_resume(tmp_path: Path) -> None:
    for step in (3, 12):
        write_checkpoint(tmp_path, step)
    (tmp_path / "global_step_copy").mkdir()
    (tmp_path / LATEST_FILE).write_text("3")  # edited by a person who wants to resume from an earlier step
    assert found(tmp_path) == tmp_path / "global_step_3"
    checkpoints(tmp_path, keep=3).save(State(step=4, kl_coef=0.0))
    assert found(tmp_path) == tmp_path / "global_step_4"


def test_lost_checkpoints_are_an_error(tmp_path: Path) -> None:
    (tmp_path / LATEST_FILE).write_text("3")
    with pytest.raises(
        ValueError, match="names step 3, but no intact global_step_3 or earlier exists.*resume_mode=disable"
    ):
        found(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0", b"global_step_3", b"\xff", b"-3"])
def test_damaged_pointer_is_named_and_newest_checkpoint_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    for step in (3, 12, 100):
        checkpoint = write_checkpoint(tmp_path, step)
    (checkpoint / "state.json").unlink()
    (tmp_path / LATEST_FILE).write_bytes(content)
    assert found(tmp_path) == tmp_path / "global_step_12"
    assert f"{tmp_path / LATEST_FILE} is damaged: the newest intact checkpoint there counts" in caplog.text
    checkpoints(tmp_path, keep=1).save(State(step=13))
    assert (tmp_path / LATEST_FILE).read_text() == "13"


def test_damaged_checkpoints_without_a_pointer_are_an_error(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 3) / MANIFEST_FILE).unlink()
    with pytest.raises(
        ValueError, match="had checkpoints, but none of them is intact: restore it.*resume_mode=disable"
    ):
        found(tmp_path)


def truncate(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path} has {path.stat().st_size} bytes instead of {path.stat().st_size + 1}"


def flip_a_bit(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path} has another content than when it was written"


def remove(path: Path) -> str:
    path.unlink()
    return f"{path} is missing"


def spoil_manifest(path: Path) -> str:
    manifest = path.parent / MANIFEST_FILE
    manifest.write_text(manifest.read_text()[:-5])
    return f"{manifest} is damaged"


def lead_elsewhere(path: Path) -> str:
    manifest = path.parent / MANIFEST_FILE
    manifest.write_text(json.dumps({"../global_step_1/state.json": [0, 0]}))
    return f"{manifest} is damaged: '../global_step_1/state.json' is no file below"


def list_names_alone(path: Path) -> str:
    manifest = path.parent / MANIFEST_FILE
    manifest.write_text('["state.json"]')
    return f"{manifest} is damaged"


@pytest.mark.parametrize("spoil", [truncate, flip_a_bit, remove, spoil_manifest, lead_elsewhere, list_names_alone])
def test_damaged_checkpoint_is_named_and_predecessor_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    for step in (1, 2, 3):
        checkpoints(tmp_path, keep=None).save(State(step=step, kl_coef=0.5))
    for step in (2, 3):
        message = spoil(tmp_path / f"global_step_{step}" / "random_states.pt")
    assert found(tmp_path) == tmp_path / "global_step_1"
    assert f"{tmp_path / 'global_step_3'} is damaged and skipped: {message}" in caplog.text
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path=.*global_step_2 is damaged: "):
        find_checkpoint(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_2"))
    checkpoints(tmp_path, keep=2).save(State(step=3, kl_coef=0.5))  # the run reaches step 3 again
    assert found(tmp_path) == tmp_path / "global_step_3"


def test_only_an_intact_checkpoint_is_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no huggingface/config\.json"):
        intact_checkpoint(tmp_path)
    for step in (1, 2):
        checkpoints(tmp_path).save(State(step=step, kl_coef=0.5))
    first, second = tmp_path / "global_step_1", tmp_path / "global_step_2"
    assert intact_checkpoint(tmp_path) == intact_checkpoint(second) == second
    truncate(second / "random_states.pt")
    assert intact_checkpoint(tmp_path) == first
    with pytest.raises(ValueError, match=r"global_step_2 is damaged: "):
        intact_checkpoint(second)


@pytest.mark.parametrize("is_async", [False, True])
def test_save_on_full_disk_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_async: bool) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        run = checkpoints(disk.path, keep=1, is_async=is_async)
        run.save(State(step=1))
        assert run.advance() == {}
        run.background.finish()
        for left in (0, SMALL_BYTES // 2):
            disk.fill(leave=left)
            run.save(State(step=2))  # nothing is raised
            assert found(disk.path) == disk.path / "global_step_1"
            assert not list(disk.path.glob(".*"))
        assert run.advance() == {"checkpoint/failed_saves": 2.0}
        assert (
            "a save failed; training continues, and the next save tries again: a checkpoint of about 0.00105 GB"
            in caplog.text
        )
        assert "No space left on device; free space there" in caplog.text
        with pytest.raises(ValueError, match="the last steps are not saved: .* No space left on device; free space"):
            run.close()
        disk.clear()
        run.save(State(step=3))
        run.close()
        assert found(disk.path) == disk.path / "global_step_3"
        assert run.advance() == {"checkpoint/failed_saves": 2.0}


def test_a_disk_that_fills_up_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        run = checkpoints(disk.path)
        run.save(State(step=1))
        monkeypatch.setattr(ConfigOnly, "write_config", lambda *_: disk.fill())
        run.save(State(step=2))
        assert run.failures.metrics() == {"checkpoint/failed_saves": 1.0}
        assert found(disk.path) == disk.path / "global_step_1"
        assert not list(disk.path.glob(".*"))


def test_a_directory_that_becomes_read_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        run = checkpoints(disk.path)
        run.save(State(step=1))
        with disk.read_only():
            run.save(State(step=2))
            with pytest.raises(ValueError, match="Read-only file system; have it mounted for writing"):
                run.close()
        run.save(State(step=2))
        run.close()
        assert found(disk.path) == disk.path / "global_step_2"


def test_disk_too_small_for_checkpoint_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        warn_of_space(disk.path, 7 << 20)
        assert not caplog.text
        warn_of_space(disk.path, 9 << 20)
    assert f"a checkpoint takes about 0.00944 GB, and only 0.00839 GB are free in {disk.path}" in caplog.text
