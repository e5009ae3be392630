"""A job that hangs ends by itself and reports the rank that is behind, and its line."""

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Timer

import pytest
import torch.distributed as dist

from megarl.distributed import watchdog
from megarl.distributed.watchdog import EXIT_CODE, RankProgress, Watchdog, polling, read_reports, summary, watching
from tests.support import stalled
from tests.support.forked import Job
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.faults, pytest.mark.timeout(1500)]
END_S = 1200  # generous, because the machine may be busy; stalled.py has the time limit of the jobs
WAYS = ("none", "stop", "sleep", "sleep-begun", "lock", "apart", "slow-rewards", "hung-rewards")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str, Path]]]:
    """Exit code, output and reports of one job per fault; the jobs run in parallel, because they only wait."""
    roots = {how: tmp_path_factory.mktemp(how) for how in WAYS}
    jobs = {how: Job(2, stalled.main, root / "hang", how, log=root / "printed") for how, root in roots.items()}
    yield {how: (job.end(timeout_s=END_S), job.printed(), roots[how] / "hang") for how, job in jobs.items()}
    for job in jobs.values():
        job.kill()


def reports(directory: Path) -> dict[int, dict[str, object]]:
    found = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    return {report["rank"]: report for report in found}


@pytest.mark.parametrize("how", ["none", "slow-rewards"])
def test_progressing_job_is_left_alone(ended: dict[str, tuple[int, str, Path]], how: str) -> None:
    code, errors, directory = ended[how]
    assert code == 0, errors
    assert not directory.exists()


def test_rewards_that_hang_end_the_job(ended: dict[str, tuple[int, str, Path]]) -> None:
    code, errors, directory = ended["hung-rewards"]
    assert code == EXIT_CODE, errors
    behind, waiting = errors.split("Behind:")[1].split("Waiting:")
    assert "rank 1 on " in behind and "step 1, phase reward, at megarl/sandbox/" in behind
    assert "rank 0 on " in waiting


@pytest.mark.parametrize("how", ["stop", "lock"])
def test_unresponsive_rank_is_named_by_other_ranks(ended: dict[str, tuple[int, str, Path]], how: str) -> None:
    code, errors, directory = ended[how]
    assert code == EXIT_CODE
    assert (
        f"megarl: no progress for {stalled.TIMEOUT_S:g} s (trainer.phase_timeout_s). Behind:\n  rank 1: no report"
        in errors
    )
    (report,) = reports(directory).values()
    assert report["rank"] == 0 and report["step"] == 1 and report["phase"] == "update_actor"


@pytest.mark.parametrize("how", ["sleep", "sleep-begun"])
def test_rank_behind_is_distinguished_from_waiting_ranks(ended: dict[str, tuple[int, str, Path]], how: str) -> None:
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


def waits_in_a_barrier(root: Path, holds_up: bool | None) -> list[bool]:
    """Return what the reports say of this rank and of another that comes late to a barrier."""
    rank = dist.get_rank()
    with watching(root / "hang", rank=rank, world_size=2, timeout_s=600.0):
        assert watchdog._watchdog
        with nullcontext() if holds_up is None else polling(lambda: holds_up):
            report = Timer(1.0, watchdog._watchdog._write, [root / f"rank_{rank}.json"])
            report.start()
            time.sleep(2.0 * rank)
            dist.barrier()
            report.join()
    dist.barrier()
    return [found.waits for _, found in sorted(read_reports(root).items())]


@pytest.mark.parametrize(("holds_up", "waits"), [(None, [True, False]), (True, [False] * 2), (False, [True] * 2)])
def test_polling_rank_reports_itself_whether_it_waits(
    pool: RankPool, tmp_path: Path, holds_up: bool | None, waits: list[bool]
) -> None:
    assert pool.run(2, waits_in_a_barrier, tmp_path, holds_up) == [waits] * 2


def test_error_of_disk_does_not_end_watch(tmp_path: Path) -> None:
    watch = Watchdog(tmp_path / ("x" * 300) / "hang", rank=0, world_size=1, timeout_s=1000.0, grace_s=0.2)
    watch.start()
    time.sleep(0.5)
    assert watch._thread.is_alive()
    watch.stop()


def test_ranks_in_an_earlier_phase_are_behind() -> None:
    def report(rank: int, num_phases: int, phase: str) -> RankProgress:
        return RankProgress(rank=rank, host="node1", num_phases=num_phases, step=3, phase=phase, rows=(), waits=True)

    said = summary(
        [report(0, 8, "ref"), report(2, 7, "reward")], world_size=4, timeout_s=60.0, directory=Path("run") / "hang"
    )
    behind, waiting = said.split("Waiting:")
    assert "rank 1: no report" in behind and "rank 3: no report" in behind
    assert "rank 2 on node1: step 3, phase reward" in behind
    assert "rank 0 on node1: step 3, phase ref" in waiting
