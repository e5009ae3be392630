"""Checkpoints of a model cut over ranks, on a disk that is full for a while."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.distributed.exchange import together
from tests.support.disks import Disk, small_disk
from tests.support.learners import ACTOR, make_test_learner, sizes, update
from tests.support.ranks import RankPool
from tests.support.records import experience

CHECKPOINTS = {"llama": ("llama", {})}


def saves(source: Path, disk: Disk, split: dict[str, Any], is_async: bool) -> tuple[list[Any], str]:
    """Save on a disk with space, without, with space for a part, for all except the index, and with space again.

    Returns the result of each save, and the error of a run that ends before the last one.
    """
    from megarl.checkpoint import failures, store
    from megarl.checkpoint.find import find_checkpoint
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.batching import Budget
    from megarl.learner.checkpoint import write_all

    learner = make_test_learner(source, split)
    update(learner, [experience()], ACTOR, Budget(max_tokens=100, max_sequences=None))
    run = CheckpointStore(
        directory=disk.path,
        learners={"actor": learner},
        keep=1,
        is_async=is_async,
    )

    def save(step: int) -> tuple[Path | None, dict[str, float], list[Path]]:
        run.save(State(step=step))
        with run.failures.tolerated():
            run.background.finish()
        return find_checkpoint(disk.path, mode="auto", path=None), run.advance(), list(disk.path.glob(".*"))

    diary = [save(1)]
    on_first_rank(disk.fill)
    diary.append(save(2))
    with pytest.MonkeyPatch.context() as patch:  # as if the disk filled up after the start of the save
        patch.setattr(failures, "SMALL_BYTES", 0)
        patch.setattr(CheckpointStore, "num_bytes", 0)
        on_first_rank(lambda: disk.fill(leave=200_000))
        diary.append(save(3))
    on_first_rank(disk.clear)
    with pytest.MonkeyPatch.context() as patch:  # as if the disk filled up when only the files of rank 0 are missing
        patch.setattr(store, "write_all", lambda writings: (write_all(writings), together(lambda: None), disk.fill()))
        diary.append(save(4))
    with pytest.raises(ValueError, match="the last steps are not saved") as raised:
        run.close()
    on_first_rank(disk.clear)
    diary.append(save(5))
    run.close()
    return diary, str(raised.value)


def space_on_disk_that_a_rank_lost(directory: Path) -> str:
    """Return the error of this rank if the disk is gone on the host of rank 1."""
    from megarl.checkpoint import failures

    def forget(path: Path) -> None:
        raise OSError(errno.ESTALE, "stale", str(path))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(shutil, "disk_usage", forget)
        with pytest.raises(OSError, match="stale") as raised:
            failures.require_space(directory, 1000)
    return str(raised.value)


def saves_with_exports(source: Path, disk: Disk, split: dict[str, Any]) -> list[Any]:
    """Save with exported weights, on a disk that fills up when rank 0 alone has something to write.

    Returns the results of five saves: with space; with a disk that fills up right after the check of the space, before
    the exported weights, whose space is not reserved, or before their config.json; and with space again.
    """
    from megarl.checkpoint import store
    from megarl.checkpoint.failures import require_space
    from megarl.checkpoint.find import find_checkpoint
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.models.architecture import hf_shapes
    from megarl.reshard import files
    from tests.support.checkpoint_models import ConfigOnly

    learner = make_test_learner(source, split)

    class WeightsOnly(ConfigOnly):
        """A model without a tokenizer."""

        def write_config(self, directory: Path) -> None:
            """Write nothing."""

        def write_weights(self, directory: Path) -> None:
            with learner.weights() as tensors:
                files.export(
                    directory,
                    hf_shapes(learner.architecture),
                    together(learner.layout),
                    tensors,
                    config={},
                    dtype=torch.float32,
                    ranks_per_node=2,
                    device=learner.device,
                )

    run = CheckpointStore(
        directory=disk.path,
        learners={"actor": learner},
        keep=1,
        models=[WeightsOnly()],
        with_weights=True,
    )

    def save(step: int) -> tuple[Path | None, dict[str, float], list[Path]]:
        run.save(State(step=step))
        on_first_rank(disk.clear)
        left = together(lambda: list(disk.path.glob(".*")))[0]  # before any rank begins the next save
        return find_checkpoint(disk.path, mode="auto", path=None), run.advance(), left

    diary = [save(1)]
    room, finish = require_space, files._finish
    for step, (module, name, instead) in enumerate(
        [
            (store, "require_space", lambda *args: (room(*args), on_first_rank(disk.fill))),
            (files, "reserve", lambda *args: disk.fill()),
            (files, "_finish", lambda *args: (disk.fill(), finish(*args))),
        ],
        start=2,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, instead)
            diary.append(save(step))
    diary.append(save(5))
    run.close()
    return diary


def save_that_one_rank_cannot_write(source: Path, directory: Path, split: dict[str, Any], is_async: bool) -> bool:
    """Save two models while the disk of rank 0 refuses the files of the first; return whether a checkpoint is there."""
    from megarl.checkpoint.find import find_checkpoint
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.patches import writing

    def refuse(writer: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    actor = make_test_learner(source, split)
    critic = make_test_learner(source, split, role="value", mesh=actor.mesh)
    run = CheckpointStore(
        directory=directory,
        learners={"actor": actor, "critic": critic},
        keep=1,
        is_async=is_async,
    )
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(writing, "_write", refuse)
        run.save(State(step=1))
        with run.failures.tolerated():
            run.background.finish()
    assert find_checkpoint(directory, mode="auto", path=None) is None
    run.save(State(step=2))
    run.close()
    return find_checkpoint(directory, mode="auto", path=None) is not None


def on_first_rank(work: Callable[[], None]) -> None:
    together(lambda: work() if dist.get_rank() == 0 else None)


@pytest.mark.parametrize("is_async", [False, True])
def test_all_ranks_continue_after_a_save_that_fails(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, is_async: bool
) -> None:
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        told = pool.run(2, saves, checkpoints["llama"], disk, sizes(2, 1), is_async)
        assert told[0] == told[1]
        diary, error = told[0]
        first, last = disk.path / "global_step_1", disk.path / "global_step_5"
        failed = [{"checkpoint/failed_saves": number} for number in (1.0, 2.0, 3.0, 3.0)]
        assert diary == [
            (first, {}, []),
            (first, failed[0], []),
            (first, failed[1], []),
            (first, failed[2], []),
            (last, failed[3], []),
        ]
        assert "the checkpoint of step 4 cannot be written" in error
        assert error.endswith("No space left on device; free space there, or name a directory on another disk")


@pytest.mark.parametrize("is_async", [False, True])
def test_no_rank_awaits_messages_of_a_failed_one(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, is_async: bool
) -> None:
    assert pool.run(2, save_that_one_rank_cannot_write, checkpoints["llama"], tmp_path, {}, is_async) == [True, True]


def test_write_failure_on_one_rank_fails_save_everywhere(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        told = pool.run(2, saves_with_exports, checkpoints["llama"], disk, sizes(2, 1))
        assert told[0] == told[1]
        first, last = disk.path / "global_step_1", disk.path / "global_step_5"
        failed = [{"checkpoint/failed_saves": number} for number in (1.0, 2.0, 3.0, 3.0)]
        assert told[0] == [(first, {}, []), *((first, count, []) for count in failed[:3]), (last, failed[3], [])]
        assert (last / "huggingface" / "config.json").is_file()


def refused(directory: Path) -> str:
    from megarl.assembly.records import check_directories
    from megarl.tracking.config import TrainerSection

    with pytest.raises(ValueError, match="cannot be written") as raised:
        check_directories(TrainerSection(default_local_dir=str(directory)))
    return str(raised.value)


def test_read_only_run_directory_is_named_everywhere(pool: RankPool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk, disk.read_only():
        for message in pool.run(2, refused, disk.path / "run"):
            assert message.startswith(f"trainer.default_local_dir={disk.path / 'run'} cannot be written: ")
            assert message.endswith("Read-only file system; have it mounted for writing, or name another directory")


def test_disk_that_one_rank_lost_fails_on_all(pool: RankPool, tmp_path: Path) -> None:
    one, other = pool.run(2, space_on_disk_that_a_rank_lost, tmp_path)
    assert one == other
