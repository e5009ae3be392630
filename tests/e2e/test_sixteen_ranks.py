"""Sixteen processes learn what one process learns: tensor 2, data 8, and eight engine replicas of two ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.commands import train
from tests.support.forked import Job
from tests.support.outcomes import metrics_of, samples_in
from tests.support.shards import tensors_of
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

NUM_STEPS = 2
NUM_UPDATES = 2 * NUM_STEPS
LEARNING_RATES = {"actor": 1e-3, "critic": 1e-5}
LAST_BIT = 2**-21
"""Of a float32 between 4 and 8, as log-probabilities are here."""
SAMPLED = ("response_ids", "group", "index", "score", "truncated", "weight_versions", "stop_reason", "prompt_ids")
OF_THE_SPLIT = ("rollout/occupancy", "sync/")  # what depends on the number of engines
RECORDING_LOSS = """
from itertools import count
from pathlib import Path

import torch
from megatron.core import parallel_state

from megarl.algorithms.losses import ppo_clip

numbers = count()


def compute_policy_loss(log_probs, old_log_probs, advantages, mask, directory):
    if parallel_state.model_parallel_is_initialized() and parallel_state.get_tensor_model_parallel_rank() == 0:
        name = f"{parallel_state.get_data_parallel_rank()}-{next(numbers)}"
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save((mask, old_log_probs, log_probs.detach(), advantages), Path(directory) / name)
    return ppo_clip(log_probs, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.2, clip_c=3.0)
"""


def learnt_from(run_dir: Path, step: int) -> list[list[Tensor]]:
    """Return old log-probabilities, log-probabilities and advantages of each sample of a step, as the loss got them.

    The loss knows no sample: those of the loss are found by the log-probabilities of the engine.
    """
    rows = list[list[Tensor]]()
    for path in (run_dir / "losses").iterdir():
        mask, *columns = torch.load(path)
        rows += [[column[row][mask[row]] for column in columns] for row in range(len(mask))]
    found = []
    for drawn in samples_in(run_dir / "samples" / f"step_{step}.parquet")["rollout_log_probs"].to_pylist():
        same = [row for row in rows if len(row[0]) == len(drawn)]
        found.append([torch.tensor(drawn), *min(same, key=lambda row: _distance(row[0], torch.tensor(drawn)))])
    assert len({each[1].data_ptr() for each in found}) == len(found), "two samples have the same log-probabilities"
    return found


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def require_same_samples(one: Path, sixteen: Path) -> None:
    """Compare the numbers of every token that the loss gets, and the engine's log-probabilities.

    A log-probability is a difference of sums of a few hundred terms, and near -7. Other orders of the sums change it by
    a few of its last bits, 4.8e-7 each. The first update makes weights differ; later numbers inherit ten times as much.
    """
    for step in range(1, NUM_STEPS + 1):
        for ours, theirs in zip(learnt_from(sixteen, step), learnt_from(one, step), strict=True):
            first, later = 8 * LAST_BIT, 80 * LAST_BIT
            before = first if step == 1 else later
            for mine, other, most in zip(ours, theirs, (before, before, later, before), strict=True):
                assert _distance(mine, other) <= most, f"step {step}"


def require_same_models(one: Path, sixteen: Path) -> None:
    """Compare every weight of actor and critic after the last step, and the moving averages of their gradients.

    Gradients are sums: they differ by some last bits of their largest terms. An update of Adam has the size of the
    learning rate even if a gradient is nothing but rounding, which then decides its sign. So a weight in a thousand may
    differ by more than a hundredth of the learning rate, and none by more than all updates in opposite directions.
    """
    for part, lr in LEARNING_RATES.items():
        ours, theirs = (tensors_of(run_dir / f"global_step_{NUM_STEPS}" / part) for run_dir in (sixteen, one))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            if "exp_avg" in name:
                assert _distance(ours[name], tensor) <= 5e-5 * float(tensor.abs().max()), f"{part}: {name}"
            elif tensor.is_floating_point():
                differences = (ours[name] - tensor).abs()
                assert float((differences > 1e-2 * lr + LAST_BIT).float().mean()) <= 1e-3, f"{part}: {name}"
                assert float(differences.max()) <= 2 * lr * NUM_UPDATES, f"{part}: {name}"


def test_sixteen_processes_learn_as_one(workspace: Workspace, tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_text(RECORDING_LOSS)

    def arguments(num_ranks: int, run_dir: Path) -> list[str]:
        tensor = min(2, num_ranks)
        return [
            *train_arguments(workspace, run_dir),
            "algorithm.adv_estimator=gae",
            f"critic.model.path={workspace.model}",
            f"actor_rollout_ref.actor.optim.lr={LEARNING_RATES['actor']}",
            f"critic.optim.lr={LEARNING_RATES['critic']}",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"actor_rollout_ref.actor.policy_loss={{loss_mode: custom, path: {own}}}",
            f"actor_rollout_ref.actor.policy_loss.kwargs={{directory: {run_dir / 'losses'}}}",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tensor}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor}",
            f"trainer.n_gpus_per_node={num_ranks}",
            f"trainer.rollout_data_dir={run_dir / 'samples'}",
            "trainer.save_freq=-1",
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
            assert sixteen[step][name] == pytest.approx(metrics[name], rel=1e-4, abs=5e-6), f"step {step}: {name}"
    assert len([*(runs[16] / "samples" / "step_1.parquet").iterdir()]) == 8
    for step in range(1, NUM_STEPS + 1):
        theirs, ours = (samples_in(run_dir / "samples" / f"step_{step}.parquet") for run_dir in runs.values())
        assert all(ours[name].equals(theirs[name]) for name in SAMPLED)
    require_same_samples(runs[1], runs[16])
    require_same_models(runs[1], runs[16])
