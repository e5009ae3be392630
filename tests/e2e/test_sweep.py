"""`megarl sweep` of two short runs: trained one after another, compared, and not repeated."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.outcomes import metrics_of, mlflow_runs
from tests.support.programs import succeed
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
LR = "actor_rollout_ref.actor.optim.lr"


def test_two_runs_are_trained_and_compared(workspace: Workspace, tmp_path: Path) -> None:
    arguments = [
        *train_arguments(workspace, tmp_path / "runs"),
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[jsonl,mlflow]",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
    ]
    command = (sys.executable, "-m", "megarl", "sweep", *arguments, "--over", f"{LR}=1e-3,1e-4")
    printed = succeed(*command, timeout_s=600)
    runs = [tmp_path / "runs" / f"lr={lr}" for lr in ("1e-3", "1e-4")]
    first, second = (metrics_of(run)[1] for run in runs)
    assert first["critic/score/mean"] == second["critic/score/mean"]  # of the same model
    assert first["actor/lr"] == pytest.approx(10 * second["actor/lr"])
    names = [run.info.run_name for directory in runs for run in mlflow_runs(directory)[1]]
    assert names == ["run-lr=1e-3", "run-lr=1e-4"]
    assert shlex.join(["megarl", "compare", *map(str, runs)]) in printed
    again = succeed(*command, timeout_s=120)
    assert "run 1 of" not in again
    assert again.strip() in printed
