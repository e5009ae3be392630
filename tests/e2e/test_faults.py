"""Jobs with faults: ranks that are killed in every phase and started again, ranks that stop, jobs that hang.

Jobs that hang mostly wait, so two of them run at once, in processes that have imported everything.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.commands import train
from megarl.distributed.watchdog import EXIT_CODE
from tests.support import faulty
from tests.support.faulty import Fault, Faults
from tests.support.forked import Job, run_job
from tests.support.outcomes import differences
from tests.support.programs import TORCHRUN, run_program
from tests.support.workspace import Workspace, ppo_arguments, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(1800)]

LAUNCH_S = 1500  # for one life of a job
NUM_STEPS = 2
RESTARTS = 1  # by torchrun
KILLS = [  # the actor learns in the second step only; until the first step is saved, a job starts from nothing
    Fault(rank=1, phase="old_log_prob"),
    Fault(rank=0, phase="save_checkpoint", delay_s=0.02),
    Fault(rank=1, phase="save_checkpoint", delay_s=math.inf),  # saved and not yet logged
    Fault(rank=0, phase="sync", step=1),
    Fault(rank=1, phase="gen", step=1, delay_s=0.02),
    Fault(rank=0, phase="reward", step=1),
    Fault(rank=1, phase="update_actor", step=1, delay_s=0.02),
]
SIDE_BY_SIDE = 2
PATIENCE_S = 5.0
STOPPED = ("sync", "gen", "reward", "old_log_prob", "update_actor", "save_checkpoint")
SLEEPY_REWARD = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if os.environ["RANK"] == "1":
        time.sleep(3600)
    return 1.0
"""


@pytest.mark.long
def test_ranks_killed_in_every_phase_leave_no_trace(workspace: Workspace, tmp_path: Path) -> None:
    """Torchrun starts the first two lives of the job; each later life is a job of its own."""
    expected, found = tmp_path / "expected", tmp_path / "found"
    length = f"trainer.total_training_steps={NUM_STEPS}"
    run_job(2, train.main, *ppo_arguments(workspace, expected), length, log=tmp_path / "expected", timeout_s=LAUNCH_S)
    faults = Faults(tmp_path / "faults.json")
    faults.write(KILLS)
    argv = [str(faults.path), *ppo_arguments(workspace, found), length]
    torchrun = (*TORCHRUN[:-1], "--max-restarts", RESTARTS, "-m")
    code, printed = run_program(*torchrun, "tests.support.faulty", *argv, timeout_s=LAUNCH_S)
    assert code != 0 and len(faults.met()) == RESTARTS + 1, printed
    for life in range(len(faults.met()), len(KILLS)):
        job = Job(2, faulty.main, argv, log=tmp_path / f"life_{life}")
        code = job.end(timeout_s=LAUNCH_S)
        assert code != 0 and len(faults.met()) == life + 1, job.printed()
    run_job(2, faulty.main, *argv, log=tmp_path / "last_life", timeout_s=LAUNCH_S)
    assert [(met["rank"], met["phase"]) for met in faults.met()] == [(kill.rank, kill.phase) for kill in KILLS]
    assert differences(expected, found, step=NUM_STEPS) == []


@dataclass(frozen=True)
class End:
    """The end of a job that hung."""

    code: int  # of the rank that ended first
    printed: str
    reports: dict[int, dict[str, object]]  # by rank


def hang_arguments(workspace: Workspace, run_dir: Path) -> list[str]:
    """Return arguments of a two-stage pipeline and a tensor-parallel engine, whose phases all need both ranks."""
    return [
        *train_arguments(workspace, run_dir),
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.val_before_train=false",
        "trainer.save_freq=1",
        "trainer.total_training_steps=2",
    ]


def hang(fault: Fault, root: Path, arguments: Sequence[str]) -> End:
    """Run a job in forked processes until a rank ends, and kill the others."""
    faults = Faults(root / "faults.json")
    faults.write([fault])
    job = Job(2, faulty.main, [str(faults.path), *arguments], log=root / "printed")
    code = job.end(timeout_s=LAUNCH_S)
    return ended(code, "\n".join(log.read_text() for log in job.logs), root / "run")


def ended(code: int, printed: str, run_dir: Path) -> End:
    found = [json.loads(path.read_text()) for path in run_dir.glob("hang-*/rank_*.json")]
    return End(code, printed, {report["rank"]: report for report in found})


@pytest.fixture(scope="module")
def ends(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[End]]]:
    """Run all jobs; return the end of each by its fault."""
    roots = {
        name: tmp_path_factory.mktemp(name) for name in ("launched", *STOPPED, "asleep", "sleepy_reward", "engine")
    }
    arguments = {name: hang_arguments(workspace, root / "run") for name, root in roots.items()}
    sleepy = roots["sleepy_reward"] / "reward.py"
    sleepy.write_text(SLEEPY_REWARD)
    arguments["sleepy_reward"] += [f"custom_reward_function.path={sleepy}", "reward_model.timeout_s=1700"]
    stops = {phase: Fault(rank=1, phase=phase, kind="stop", patience_s=PATIENCE_S) for phase in STOPPED}
    slow = {  # all ranks must report in time, also on a slow machine
        "asleep": Fault(rank=1, phase="update_actor", kind="sleep", patience_s=6 * PATIENCE_S),
        "sleepy_reward": Fault(rank=1, phase="reward", kind="none", patience_s=6 * PATIENCE_S),
        "engine": Fault(rank=1, phase="gen", kind="engine"),
    }
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        launched = pool.submit(launch, stops["update_actor"], roots["launched"], arguments["launched"])
        forked = {
            name: pool.submit(hang, fault, roots[name], arguments[name]) for name, fault in (stops | slow).items()
        }
        yield {"launched": launched, **forked}
        pool.shutdown(cancel_futures=True)


def launch(fault: Fault, root: Path, arguments: Sequence[str]) -> End:
    """Run a job under megarl's launcher."""
    faults = Faults(root / "faults.json")
    faults.write([fault])
    code, printed = run_program(
        sys.executable, "-m", "tests.support.faulty", faults.path, *arguments, timeout_s=LAUNCH_S
    )
    return ended(code, printed, root / "run")


@pytest.mark.parametrize("phase", STOPPED)
def test_stopped_rank_is_named_and_ends_job(ends: dict[str, Future[End]], phase: str) -> None:
    end = ends[phase].result()
    assert end.code == EXIT_CODE, end.printed
    assert "Behind:\n  rank 1: no report" in end.printed
    assert f"Waiting:\n  rank 0 on {os.uname().nodename}: step 0, phase {phase}, at megarl/" in end.printed
    assert end.reports.keys() == {0}


def test_a_launcher_ends_a_stopped_rank_too(ends: dict[str, Future[End]]) -> None:
    end = ends["launched"].result()  # available when no process has its output open
    assert end.code == EXIT_CODE, end.printed
    assert "Behind:\n  rank 1: no report" in end.printed


def test_rank_missing_from_collective_is_named(ends: dict[str, Future[End]]) -> None:
    end = ends["asleep"].result()
    assert end.code == EXIT_CODE, end.printed
    behind, waiting = end.printed.split("Behind:")[1].split("Waiting:")
    assert "rank 1 on " in behind and "step 0, phase update_actor" in behind and "rank 0" not in behind
    assert "rank 0 on " in waiting
    assert end.reports[0]["waits"] and not end.reports[1]["waits"]


def test_sleeping_reward_is_named_with_its_rows(ends: dict[str, Future[End]]) -> None:
    end = ends["sleepy_reward"].result()
    assert end.code == EXIT_CODE, end.printed
    behind, waiting = end.printed.split("Behind:")[1].split("Waiting:")
    rows = ", ".join(map(str, end.reports[1]["rows"]))  # type: ignore[call-overload]
    place = r"step 0, phase reward, at megarl/(sandbox|rewards)/"  # it waits for the reward, and now and then counts
    assert "rank 1 on " in behind and re.search(place, behind) and f"rows {rows}" in behind
    assert "rank 0 on " in waiting


def test_engine_failure_on_one_rank_ends_job(ends: dict[str, Future[End]]) -> None:
    end = ends["engine"].result()
    assert end.code == 1, end.printed
    assert "engine replica 0 (ranks 0-1) failed after 0 finished steps" in end.printed and "planted" in end.printed
