"""Sixteen processes learn what one process learns: tensor 2, data 8, and eight engine replicas of two ranks."""

from pathlib import Path

import pytest

from megarl.commands import train
from tests.support.forked import Job
from tests.support.outcomes import metrics_of, samples_in
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

NUM_STEPS = 2
SAMPLED = ("response_ids", "group", "index", "score", "truncated", "weight_versions", "stop_reason", "prompt_ids")
OF_THE_SPLIT = ("rollout/occupancy", "sync/")  # what depends on the number of engines


def test_sixteen_processes_learn_as_one(workspace: Workspace, tmp_path: Path) -> None:
    def arguments(num_ranks: int, run_dir: Path) -> list[str]:
        tensor = min(2, num_ranks)
        return [
            *train_arguments(workspace, run_dir),
            "algorithm.adv_estimator=gae",
            f"critic.model.path={workspace.model}",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tensor}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor}",
            f"trainer.n_gpus_per_node={num_ranks}",
            f"trainer.rollout_data_dir={run_dir / 'samples'}",
            "trainer.save_freq=-1",
            "trainer.save_last=false",
            f"trainer.test_freq={NUM_STEPS}",
            f"trainer.total_training_steps={NUM_STEPS}",
        ]

    runs = {num_ranks: tmp_path / f"{num_ranks}" for num_ranks in (1, 16)}
    for num_ranks, run_dir in runs.items():
        job = Job(num_ranks, train.main, arguments(num_ranks, run_dir), log=tmp_path / f"log-{num_ranks}")
        job.finish(timeout_s=900)
    one, sixteen = (metrics_of(run_dir) for run_dir in runs.values())
    assert [*one] == [*sixteen] == [*range(NUM_STEPS + 1)]
    for step, metrics in one.items():
        names = [name for name in metrics if not name.startswith(OF_THE_SPLIT)]
        assert len(names) > 5
        for name in names:
            assert sixteen[step][name] == pytest.approx(metrics[name], rel=2e-3, abs=1e-5), f"step {step}: {name}"
    assert len([*(runs[16] / "samples" / "step_1.parquet").iterdir()]) == 8
    for step in range(1, NUM_STEPS + 1):
        theirs, ours = (samples_in(run_dir / "samples" / f"step_{step}.parquet") for run_dir in runs.values())
        assert all(ours[name].equals(theirs[name]) for name in SAMPLED)
