"""A real run that is killed, one that a signal asks to end, and the run that resumes from it."""

import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.commands import train
from megarl.distributed.signals import EXIT_CODE
from tests.support.cores import all_cores
from tests.support.forked import run_job
from tests.support.outcomes import metrics_of, mlflow_runs
from tests.support.programs import CTRL_C, PYTHON, ROOT, AtTerminal
from tests.support.workspace import Workspace, train_arguments

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the ranks to tell, and ends them with it"),
]
LAUNCH_S = 600
HELD_REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while (HERE / "hold").exists():
        (HERE / "held").touch()
        time.sleep(0.05)
    return sum(character.isdigit() for character in solution_str) / 10
"""
MARK = "MEGARL_TEST_MARK"


class World:
    """A run whose reward waits while the file `hold` exists."""

    def __init__(self, workspace: Workspace, root: Path) -> None:
        self.run_dir, self._hold, self._held = root / "run", root / "hold", root / "held"
        reward = root / "reward.py"
        reward.write_text(HELD_REWARD)
        self.arguments = [
            *train_arguments(workspace, self.run_dir),
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={reward}",
            "reward_model.timeout_s=600",
            "trainer.logger=[jsonl,mlflow]",
            "trainer.val_before_train=false",
            "trainer.total_training_steps=3",
            'trainer.on_end=echo $MEGARL_ENDING >> "$MEGARL_RUN_DIR/endings"',
        ]

    @contextmanager
    def held(self, mark: str) -> Iterator["subprocess.Popen[str]"]:
        """Start the run, yield it in the reward of its first step; its processes have `mark` in their environment."""
        self._hold.touch()
        self._held.unlink(missing_ok=True)
        with all_cores():
            started = subprocess.Popen(
                [*PYTHON, "megarl.commands.train", *self.arguments],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), MARK: mark},
                stderr=subprocess.PIPE,
                text=True,
            )
        with started as process:
            try:
                while not self._held.exists():
                    assert process.poll() is None, process.communicate()[1][-5000:]
                    time.sleep(0.05)
                yield process
            finally:
                process.kill()

    def at_terminal(self) -> AtTerminal:
        """Start the run at a terminal and return it in the reward of its first step."""
        self._hold.touch()
        self._held.unlink(missing_ok=True)
        job = AtTerminal([*PYTHON, "megarl.commands.train", *self.arguments], os.environ | {"PYTHONPATH": str(ROOT)})
        while not self._held.exists():
            time.sleep(0.05)  # until the test's own time limit
        return job

    def release(self) -> None:
        self._hold.unlink()


def living(mark: str) -> dict[str, set[Path]]:
    """Return the processes that have `mark` in their environment: command -> shared memory that they map."""
    found = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # not a process, gone, or of another user
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                mapped = re.findall(r"/dev/shm/\S+", (process / "maps").read_text())
                command = (process / "cmdline").read_text().replace("\0", " ")
                found[f"{process.name} {command}"] = set(map(Path, mapped))
    return found


@pytest.fixture(scope="module")
def told(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, dict[str, Any]]:
    """Kill a run in its first step, end it by Ctrl-C in that step, then let it finish; return it and what was seen."""
    world, seen = World(workspace, tmp_path_factory.mktemp("told")), dict[str, Any]()
    mark = uuid.uuid4().hex
    with world.held(mark) as process:
        seen["killed"] = living(mark)
        process.kill()
        process.wait()
        while living(mark):
            time.sleep(0.05)  # until the test's own time limit
    job = world.at_terminal()
    seen["segments left"] = [path for paths in seen["killed"].values() for path in paths if path.exists()]
    job.type(CTRL_C)
    job.read_until("rank 0: SIGINT")
    world.release()
    seen["code"], seen["messages"] = job.end()
    seen["metrics"] = metrics_of(world.run_dir)
    seen["mlflow"] = [run.info.status for run in mlflow_runs(world.run_dir, "megarl_examples")[1]]
    seen["checkpoints"] = [path.name for path in world.run_dir.glob("global_step_*")]
    run_job(2, train.main, *world.arguments, log=world.run_dir.parent / "resumed", timeout_s=LAUNCH_S)
    seen["endings"] = (world.run_dir / "endings").read_text().split()
    return world, seen


def test_nothing_outlives_a_launcher_that_is_killed(told: tuple[World, dict[str, Any]]) -> None:
    _, seen = told
    commands = "\n".join(seen["killed"])  # all ended a moment later
    assert commands.count("megarl.commands.train") >= 3  # the launcher and its ranks
    assert "megarl.rewards.supervisor" in commands
    assert not seen["segments left"]  # after the start of the next job


def test_signalled_run_saves_its_step_and_reports_it(told: tuple[World, dict[str, Any]]) -> None:
    seen = told[1]
    assert seen["code"] == EXIT_CODE, seen["messages"]
    command = shlex.join(map(str, [*PYTHON, "megarl.commands.train", *told[0].arguments]))
    said = "".join(seen["messages"].split())  # as wide as the terminal
    assert "".join(f"megarl: stopped by a signal, step 1 is saved; resume with {command}".split()) in said
    assert "Traceback" not in seen["messages"]
    assert seen["checkpoints"] == ["global_step_1"]  # although trainer.save_freq asks for none
    assert list(seen["metrics"]) == [1]
    assert seen["mlflow"][0] == "KILLED"  # the other entry is the killed run


def test_a_command_learns_how_each_part_ended(told: tuple[World, dict[str, Any]]) -> None:
    assert told[1]["endings"] == ["killed", "stopped", "finished"]


def test_run_resumed_after_signal_matches_uninterrupted_run(
    workspace: Workspace, told: tuple[World, dict[str, Any]], tmp_path: Path
) -> None:
    world, seen = told
    other = World(workspace, tmp_path)
    run_job(2, train.main, *other.arguments, log=tmp_path / "other", timeout_s=LAUNCH_S)
    expected = metrics_of(other.run_dir)
    assert metrics_of(world.run_dir) == expected
    assert seen["metrics"] == {1: expected[1]}
    statuses = [run.info.status for run in mlflow_runs(world.run_dir, "megarl_examples")[1]]
    assert statuses == ["FINISHED", *seen["mlflow"][1:]]  # the resumed run continues the first entry
