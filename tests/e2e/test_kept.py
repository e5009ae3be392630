"""A run that is killed while it generates draws only what it had not drawn, and ends like an undisturbed run.

The ranks are forked from a process that has imported everything. SIGKILL ends them all between two exchanges.
"""

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from megarl.columns import Integers
from megarl.commands import train
from megarl.rollout.session import SamplingSession
from megarl.rollout.table import GroupRows
from megarl.samples.step_cache import KEPT
from tests.support.forked import Job
from tests.support.outcomes import metrics_of, samples_in
from tests.support.shards import tensors_of
from tests.support.workspace import Workspace, train_arguments, with_many_ends

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RUN_S = 600
KILLED = 1  # the step, counted from 0, in which the run is killed


def stand_still(marker: Path, arguments: list[str]) -> None:
    """On each rank: train until the second exchange of step KILLED, create `marker`, and wait to be killed."""
    advance, num_windows = SamplingSession._advance, [0]

    def advance_and_wait(self: SamplingSession, num_steps: int | None) -> list[int]:
        if self._queue.weight_version == KILLED:
            num_windows[0] += 1
            if num_windows[0] == 3:
                marker.touch()
                signal.pause()
        return advance(self, num_steps)

    SamplingSession._advance = advance_and_wait  # type: ignore[method-assign]
    train.main(arguments)


def count_prompts(file: Path, arguments: list[str]) -> None:
    """On each rank: train, and write the rows that each session draws to `file`."""
    add = SamplingSession._add

    def add_and_count(self: SamplingSession, numbers: Integers, groups: GroupRows) -> None:
        if self._engine.replica == 0:
            with file.open("a") as lines:
                rows = sorted(prompt.index for prompt in groups.prompts)
                lines.write(json.dumps([self._queue.weight_version, rows]) + "\n")
        add(self, numbers, groups)

    SamplingSession._add = add_and_count  # type: ignore[method-assign]
    train.main(arguments)


def test_run_killed_during_generation_samples_only_missing_responses(workspace: Workspace, tmp_path: Path) -> None:
    model = with_many_ends(workspace.model, tmp_path / "model", one_of=32)  # some responses take three windows

    def arguments(run_dir: Path) -> list[str]:
        return [
            *train_arguments(workspace, run_dir),
            f"actor_rollout_ref.model.path={model}",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.keep_complete=true",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "data.max_response_length=96",
            f"trainer.rollout_data_dir={run_dir / 'samples'}",
            "trainer.logger=[jsonl]",
            "trainer.save_freq=1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.total_training_steps=3",
        ]

    whole, killed, marker, drawn = (tmp_path / name for name in ("whole", "killed", "marker", "drawn"))
    Job(2, train.main, arguments(whole), log=tmp_path / "log-whole").finish(timeout_s=RUN_S)
    job = Job(2, stand_still, marker, arguments(killed), log=tmp_path / "log-killed")
    job.kill_when(marker.exists, timeout_s=RUN_S)
    kept = {row for file in (killed / KEPT).rglob("*.parquet") for row in pq.read_table(file)["row"].to_pylist()}
    Job(2, count_prompts, drawn, arguments(killed), log=tmp_path / "log-resumed").finish(timeout_s=RUN_S)

    sample = samples_in(whole / "samples" / f"step_{KILLED + 1}.parquet")
    asked = {
        row for version, rows in map(json.loads, drawn.read_text().splitlines()) if version == KILLED for row in rows
    }
    assert kept and asked, "some prompts were complete, and some were not"
    assert not kept & asked
    assert len(kept | asked) == 8
    for step in (1, 2, 3):
        ours, theirs = (samples_in(run_dir / "samples" / f"step_{step}.parquet") for run_dir in (killed, whole))
        assert ours.equals(theirs), step
    assert sample.num_rows == 16
    other = {
        name for name, value in metrics_of(whole)[KILLED + 1].items() if metrics_of(killed)[KILLED + 1][name] != value
    }
    assert other <= {"rollout/occupancy"}
    expected, found = (tensors_of(run_dir / "global_step_3" / "actor") for run_dir in (whole, killed))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not [place for place in (killed / KEPT).iterdir() if not place.name.startswith("step_2-")]
