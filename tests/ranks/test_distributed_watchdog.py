"""A job that hangs ends by itself and reports the rank that is behind, and its line."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.distributed.watchdog import EXIT_CODE, Report, summary
from tests.support.programs import ROOT
from tests.support.stalled import TIMEOUT_S

pytestmark = [pytest.mark.ranks, pytest.mark.faults, pytest.mark.timeout(1500)]
END_S = 1200  # generous, because the machine may be busy; stalled.py has the measured time
WAYS = ("none", "stop", "sleep", "sleep-begun", "lock", "apart", "slow-rewards", "hung-rewards")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str, Path]]]:
    """Exit code, standard error and reports of one job per fault; the jobs run in parallel, because they only wait."""
    jobs = {}
    for how in WAYS:
        directory = tmp_path_factory.mktemp(how) / "hang"
        command = [sys.executable, "-m", "tests.support.stalled", str(directory), how]
        jobs[how] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True), directory
    yield {how: (*_end(process), directory) for how, (process, directory) in jobs.items()}
    for process, _ in jobs.values():
        process.kill()


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=END_S)
    return process.returncode, errors


def reports(directory: Path) -> dict[int, dict[str, object]]:
    found = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    return {report["rank"]: report for report in found}


@pytest.mark.parametrize("how", ["none", "slow-rewards"])
def test_a_job_that_goes_on_is_left_alone(ended: dict[str, tuple[int, str, Path]], how: str) -> None:
    code, errors, directory = ended[how]
    assert code == 0, errors
    assert not directory.exists()


def test_rewards_that_hang_end_the_job(ended: dict[str, tuple[int, str, Path]]) -> None:
    code, errors, directory = ended["hung-rewards"]
    assert code == EXIT_CODE, errors
    behind, waiting = errors.split("Behind:")[1].split("Waiting:")
    assert "rank 1 on " in behind and "step 1, phase reward, at megarl/rewards/" in behind
    assert "rank 0 on " in waiting


@pytest.mark.parametrize("how", ["stop", "lock"])
def test_a_rank_that_cannot_speak_is_named_by_the_others(ended: dict[str, tuple[int, str, Path]], how: str) -> None:
    code, errors, directory = ended[how]
    assert code == EXIT_CODE
    assert f"megarl: no progress for {TIMEOUT_S:g} s (trainer.phase_timeout_s). Behind:\n  rank 1: no report" in errors
    (report,) = reports(directory).values()
    assert report["rank"] == 0 and report["step"] == 1 and report["phase"] == "update_actor"


@pytest.mark.parametrize("how", ["sleep", "sleep-begun"])
def test_a_rank_that_is_elsewhere_is_told_from_those_that_wait(
    ended: dict[str, tuple[int, str, Path]], how: str
) -> None:
    code, errors, directory = ended[how]
    assert code == EXIT_CODE
    behind, waiting = errors.split("Behind:")[1].split("Waiting:")
    assert "rank 1 on " in behind and "step 1, phase update_actor" in behind and "rows 4, 7" in behind
    assert "rank 0 on " in waiting
    found = reports(directory)
    assert any("in halt" in line for line in found[1]["stacks"])  # type: ignore[attr-defined]
    assert found[0]["waits"] and not found[1]["waits"]


def test_a_collective_that_one_rank_never_joins(ended: dict[str, tuple[int, str, Path]]) -> None:
    code, errors, directory = ended["apart"]
    assert code == EXIT_CODE
    assert "no rank: all wait in collectives, but in different ones" in errors
    assert any("in halt" in line for line in reports(directory)[1]["stacks"])  # type: ignore[attr-defined]


def test_ranks_in_an_earlier_phase_are_behind() -> None:
    def report(rank: int, num_phases: int, phase: str) -> Report:
        return Report(rank=rank, host="node1", num_phases=num_phases, step=3, phase=phase, rows=(), waits=True)

    said = summary(
        [report(0, 8, "ref"), report(2, 7, "reward")], world_size=4, timeout_s=60.0, directory=Path("run") / "hang"
    )
    behind, waiting = said.split("Waiting:")
    assert "rank 1: no report" in behind and "rank 3: no report" in behind
    assert "rank 2 on node1: step 3, phase reward" in behind
    assert "rank 0 on node1: step 3, phase ref" in waiting
