"""Jobs on two nodes of a real Slurm: what ranks see of GPUs; a signal saves and requeues a job, which then resumes; an
array of the runs of a sweep.
"""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from megarl.distributed.hosts import main_address
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.protocol import Row
from tests.support.programs import ROOT, succeed
from tests.support.slurm import Slurm, slurm, unavailable
from tests.support.workspace import make_workspace, train_arguments

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "Slurm is here"),
]
STEPS = 12
LR = "actor_rollout_ref.actor.optim.lr"
SCRIPT = ROOT / "scripts" / "launch_slurm.sh"
SHOW_RANK = """#!/bin/sh
echo "rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME, GPUs ${CUDA_VISIBLE_DEVICES-not limited}: $*"
"""


def ranks_of(cluster: Slurm, root: Path, options: Sequence[str]) -> list[str]:
    """Submit the script with a program that only says which rank it is; return what the ranks say, in their order."""
    program, output = root / "show_rank", root / "ranks.txt"
    program.write_text(SHOW_RANK)
    program.chmod(0o755)
    cluster.environ["PYTHON"] = str(program)
    settings = ["--nodes=2", "--ntasks-per-node=2", f"--output={output}", *options]
    job = cluster.submit(SCRIPT, "run.yaml", options=settings)
    cluster.wait(job, lambda: cluster.field(job, "JobState") == "COMPLETED", output=output, timeout_s=100)
    return sorted(line for line in output.read_text().splitlines() if line.startswith("rank "))


def expected(gpus: str) -> list[str]:
    return [
        f"rank {rank} of 4 on n{rank // 2 + 1}, GPUs {gpus}: "
        "-m megarl.commands.train run.yaml trainer.nnodes=2 trainer.n_gpus_per_node=2"
        for rank in range(4)
    ]


def test_every_rank_sees_all_gpus_of_its_node(tmp_path: Path) -> None:
    with slurm(gpus_per_node=2) as cluster:
        assert ranks_of(cluster, tmp_path, ["--gpus-per-node=2"]) == expected("0,1")


def test_a_cluster_that_knows_no_gpus_limits_none(tmp_path: Path) -> None:
    with slurm(gpus_per_node=0) as cluster:
        with pytest.raises(AssertionError, match="Invalid generic resource"):
            cluster.submit(SCRIPT, "run.yaml", options=["--nodes=2"])
        assert ranks_of(cluster, tmp_path, ["--gpus-per-node=0"]) == expected("not limited")


@pytest.mark.timeout(2000)
def test_a_signalled_job_is_requeued_and_resumes(tmp_path: Path) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "job.txt"
    arguments = [
        *train_arguments(make_workspace(tmp_path / "files"), run_dir),
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"),
        *("trainer.device=cpu", f"trainer.total_training_steps={STEPS}"),
    ]

    def rows() -> list[Row]:
        log = run_dir / "metrics.jsonl"
        return read_jsonl(log) if log.exists() else []

    with slurm(gpus_per_node=1) as cluster:
        cluster.environ.update({"PYTHON": sys.executable, "MASTER_ADDR": main_address(), "OMP_NUM_THREADS": "1"})
        options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", f"--output={output}"]
        job = cluster.submit(SCRIPT, *arguments, options=options)
        cluster.wait(job, lambda: bool(rows()), output=output, timeout_s=600)
        cluster.call("scancel", "--signal=USR1", job)
        requeue_soon(cluster, job, output)
        before = rows()
        assert len(before) < STEPS, "it was too late for the signal"
        cluster.wait(job, lambda: cluster.field(job, "JobState") == "COMPLETED", output=output, timeout_s=1000)
        assert cluster.field(job, "Restarts") == "1"
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    assert rows()[: len(before)] == before  # it did not start anew
    printed = output.read_text()
    assert printed.count("SIGUSR1: the job ends when this step is saved") == 2  # on each node
    assert f"stopped by a signal, step {len(before)} is saved" in printed


@pytest.mark.timeout(2000)
def test_a_sweep_is_an_array_of_jobs(tmp_path: Path) -> None:
    """A signal requeues one job of the array, which resumes; the command then has nothing left to submit."""
    out, directories = tmp_path / "runs", [tmp_path / "runs" / f"lr={lr}" for lr in ("1e-3", "1e-4")]
    arguments = [
        *train_arguments(make_workspace(tmp_path / "files"), out),
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"),
        *("trainer.device=cpu", f"trainer.total_training_steps={STEPS}", "trainer.n_gpus_per_node=1"),
        *("--over", f"{LR}=1e-3,1e-4", "--slurm"),
    ]
    sweep = (sys.executable, "-m", "megarl", "sweep", *arguments)
    with slurm(gpus_per_node=1) as cluster:
        cluster.environ.update({"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"})
        assert "sbatch" in succeed(*sweep, timeout_s=200)
        options = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", f"--output={tmp_path}/job-%a.txt"]
        job = cluster.submit(out / "sweep.sh", options=[*options, "--array=0-1%1"])
        first, second = ((f"{job}_{index}", tmp_path / f"job-{index}.txt") for index in range(2))
        log = directories[0] / "metrics.jsonl"
        cluster.wait(first[0], lambda: log.exists() and bool(read_jsonl(log)), output=first[1], timeout_s=600)
        cluster.call("scancel", "--signal=USR1", first[0])
        requeue_soon(cluster, *first)
        for task, output in (first, second):
            cluster.wait(task, partial(is_completed, cluster, task), output=output, timeout_s=1000)
        assert [cluster.field(task, "Restarts") for task, _ in (first, second)] == ["1", "0"]
    rows = [read_jsonl(directory / "metrics.jsonl") for directory in directories]
    assert [[row["step"] for row in run] for run in rows] == [list(range(1, STEPS + 1))] * 2
    assert rows[0][0]["actor/lr"] == pytest.approx(10 * rows[1][0]["actor/lr"])
    again = succeed(*sweep, timeout_s=200)
    assert "sbatch" not in again
    assert shlex.join(["megarl", "compare", *map(str, directories)]) in again


def requeue_soon(cluster: Slurm, job: str, output: Path) -> None:
    """Wait until a job is requeued, and let it start in 5 s, not 2 minutes. At once its new credentials are refused."""
    cluster.wait(job, lambda: cluster.field(job, "JobState") == "PENDING", output=output, timeout_s=300)
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")


def is_completed(cluster: Slurm, job: str) -> bool:
    return cluster.field(job, "JobState") == "COMPLETED"
