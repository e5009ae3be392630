"""A job on two nodes of a real Slurm: a signal saves and requeues it, and it resumes when Slurm starts it again."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.lines import Row
from tests.support.programs import ROOT
from tests.support.slurm import Slurm, slurm, unavailable
from tests.support.workspace import make_workspace, train_arguments

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "Slurm is here"),
]
STEPS = 12
SCRIPT = ROOT / "scripts" / "launch_slurm.sh"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as running:
        yield running


@pytest.mark.timeout(1200)
def test_a_signalled_job_is_requeued_and_resumes(
    tmp_path: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "job.txt"
    arguments = [
        *train_arguments(make_workspace(tmp_path / "files"), run_dir),
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"),
        f"trainer.total_training_steps={STEPS}",
    ]
    settings = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    cluster.environ.update(settings)
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={output}"]
    job = cluster.submit(SCRIPT, *arguments, options=options)

    def rows() -> list[Row]:
        log = run_dir / "metrics.jsonl"
        return read_jsonl(log) if log.exists() else []

    cluster.wait(job, lambda: bool(rows()), output=output, timeout_s=400)
    cluster.call("scancel", "--signal=USR1", job)
    cluster.wait(job, lambda: cluster.field(job, "Restarts") == "1", output=output, timeout_s=200)
    before = rows()
    assert len(before) < STEPS, "it was too late for the signal"
    cluster.wait(job, lambda: cluster.field(job, "JobState") == "COMPLETED", output=output, timeout_s=500)
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    assert rows()[: len(before)] == before  # it did not start anew
    printed = output.read_text()
    assert printed.count("SIGUSR1: the job ends when this step is saved") == 2  # on each node
    assert f"stopped by a signal, step {len(before)} is saved" in printed
