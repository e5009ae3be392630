"""A directory belongs to one running job, and the unfinished files of a job that died are removed or restored."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.assembly.resume import prepare_checkpoint
from megarl.checkpoint import occupancy
from megarl.checkpoint.directory import LATEST_FILE, LOCK
from megarl.checkpoint.find import find_checkpoint
from megarl.checkpoint.occupancy import occupy
from megarl.checkpoint.state import State
from megarl.checkpoint.store import CheckpointStore
from megarl.tracking.config import TrainerSection
from tests.support.programs import ROOT
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
HOLDER = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from megarl.checkpoint.occupancy import occupy
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=0, world_size=1)
with occupy(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
LEFT = {  # by a job that died: a file, and whether it is there afterwards
    "global_step_4/state.json": True,
    ".global_step_4.old/state.json": False,  # the new checkpoint is there
    ".global_step_5.part/actor/shard": False,
    ".latest_checkpointed_iteration.txt.part": False,
    "notes.part": True,  # a file of the user
    "samples/.kept.part": True,
}


@contextmanager
def another_job(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def enter(directory: Path, patience_s: float) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(occupancy, "PATIENCE_S", patience_s)
        lock = occupy(directory)
    with lock:
        return (directory / LOCK).read_text()


def test_job_waiting_for_directory_reports_holder_immediately(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occupancy, "PATIENCE_S", 600.0)
    with another_job(tmp_path) as process:
        waiting = threading.Thread(target=occupancy._enter, args=[tmp_path])
        waiting.start()
        while not caplog.messages:  # until the test's own time limit
            time.sleep(0.01)
        process.kill()
        waiting.join()
    holder = f"process {process.pid} on {os.uname().nodename}"
    assert caplog.messages == [f"{tmp_path} is in use: waiting up to 600 s for {holder}"]


def test_running_job_locks_directory_until_it_dies(pool: RankPool, tmp_path: Path) -> None:
    directory = tmp_path / "new"
    with another_job(directory) as process:
        with pytest.raises(AssertionError) as refused:
            pool.run(2, enter, directory, 0.0)
        assert f"is in use by another job: process {process.pid} on {os.uname().nodename}" in str(refused.value)
        process.kill()
        pool.run(2, enter, directory, 600.0)  # waits until that job has ended
    assert pool.run(2, enter, directory, 0.0) == pool.run(
        2, enter, directory, 0.0
    )  # a job that has ended does not hold the directory


def see_own_directory(root: Path, look: Callable[[Path], Any]) -> str:
    """Return the error of a rank whose RUN_DIR is on a local disk."""
    disk = root / f"rank{dist.get_rank()}"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ValueError, match="run") as refused:
        monkeypatch.chdir(disk)
        monkeypatch.setattr(occupancy, "VISIBLE_S", 0.0)
        look(Path("run"))
    return str(refused.value)


def test_ranks_that_see_another_directory_refuse_it(pool: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}" / "run").mkdir(parents=True)
    said = pool.run(2, see_own_directory, tmp_path, occupy)
    assert said[0] == said[1]
    assert said[0] == (
        "trainer.default_local_dir=run is not the same directory for rank 0 and for ranks 1 "
        f"({os.uname().nodename}): name a directory on a file system that all hosts share"
    )


def test_ranks_that_see_another_step_refuse_to_resume(pool: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        (checkpoint := tmp_path / f"rank{rank}" / "run" / f"global_step_{rank + 2}").mkdir(parents=True)
        (checkpoint / "state.json").touch()
        (checkpoint.parent / LATEST_FILE).write_text(str(rank + 2))
    said = pool.run(2, see_own_directory, tmp_path, partial(find_checkpoint, mode="auto", path=None))
    assert said[0] == said[1]
    assert said[0].splitlines()[1:] == [
        "  run/global_step_*: [2] on rank 0, [3] on rank 1",
        f"  run/{LATEST_FILE}: 2 on rank 0, 3 on rank 1",
    ]


def start_again(run_dir: Path) -> Path | None:
    """Return the checkpoint that a job resumes with `disable` if one of its ranks was restarted."""
    run = CheckpointStore(directory=run_dir, learners={}, keep=None)
    run.save(State(step=2))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(dist.get_rank()))
        return prepare_checkpoint(TrainerSection(default_local_dir=str(run_dir), resume_mode="disable"))


def test_restart_by_launcher_need_not_reach_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, start_again, tmp_path) == [tmp_path / "global_step_2"] * 2


def test_unfinished_files_of_dead_job_are_removed(pool: RankPool, tmp_path: Path) -> None:
    for name in LEFT:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    pool.run(2, enter, tmp_path, 0.0)
    assert {name: (tmp_path / name).exists() for name in LEFT} == LEFT


def test_checkpoint_under_replacement_gets_its_name_back(pool: RankPool, tmp_path: Path) -> None:
    for name in (".global_step_4.old", ".global_step_4.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(name)
    pool.run(2, enter, tmp_path, 0.0)
    assert (tmp_path / "global_step_4" / "state.json").read_text() == ".global_step_4.old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "global_step_4"]
