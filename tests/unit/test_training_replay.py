"""A replay takes the right files of a directory, and reads their samples unchanged."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.batch import Scored
from megarl.data.order import Position
from megarl.platform.errors import UserError
from megarl.rollout.config import RoutingReplay
from megarl.samples.store import SampleStore, write_samples
from megarl.tracking.timers import Timers
from megarl.training.replay import Recorder, Replay
from tests.support.disks import small_disk
from tests.support.ranks import world_of_one
from tests.support.records import answer, prompts


def keep(directory: Path, *steps: int, routes: torch.Tensor | None = None) -> None:
    """Files of steps. The scores of a step are its number, and each place has the same routes."""
    rollouts = answer(prompts([1, 1]), [1, 2, 1, 1])
    if routes is not None:
        rollouts = replace(rollouts, routes=routes.expand(int(rollouts.num_places().sum()), *routes.shape))
    for step in steps:
        scores = torch.full((4,), float(step))
        scored = rollouts.extend(Scored, texts=[""] * 4, scores=scores, accuracies=scores)
        write_samples(directory / f"step_{step}.parquet", scored, scores + 0.5, step=step)


def test_all_iterations_that_follow_the_weights(tmp_path: Path) -> None:
    keep(tmp_path, 1, 2, 3, 4)
    replay = Replay.find(tmp_path, after=2)
    assert (replay.first_step, replay.last_step) == (2, 4)
    with world_of_one():
        collected = replay.collect(Position(1, 8), Timers(), step=3)
    assert collected.scored.share.scores.tolist() == [4.0] * 4
    assert collected.baselines is not None
    assert collected.baselines.tolist() == [4.5] * 4
    assert collected.position == Position(1, 8)
    assert collected.metrics == {}


def test_one_file_whatever_the_weights_and_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, 7)
    renamed = (tmp_path / "step_7.parquet").rename(tmp_path / "odd.parquet")
    replay = Replay.find(renamed, after=2)
    assert (replay.first_step, replay.last_step) == (6, 7)
    with world_of_one():
        assert replay.collect(Position(), Timers(), step=6).scored.share.scores.tolist() == [7.0] * 4
    assert "odd.parquet has the samples of step 7, which were drawn with the weights after 6 steps" in caplog.text
    assert "has the weights after 2." in caplog.text
    caplog.clear()
    Replay.find(renamed, after=6)
    assert not caplog.text


@pytest.mark.parametrize(("steps", "after"), [((1, 2, 4), 0), ((2, 3), 0), ((1, 2), 2), ((), 0)])
def test_a_directory_without_the_next_iterations_is_refused(tmp_path: Path, steps: tuple[int, ...], after: int) -> None:
    keep(tmp_path, *steps)
    listed = ", ".join(map(str, steps)) or "no steps"
    with pytest.raises(ValueError, match=f"those after {after} steps, .* it has {listed}. Name one file"):
        Replay.find(tmp_path, after=after)


def test_samples_refused_by_full_disk_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, 1, 2, 3)
    replay = Replay.find(tmp_path, after=0)
    with world_of_one(), small_disk(tmp_path / "disk", 1 << 20) as disk:
        directory = disk.path / "samples"
        recorder = Recorder(samples=replay, store=SampleStore(directory))
        assert recorder.collect(Position(), Timers(), step=0).metrics == {"archive/failures": 0.0}
        disk.fill()
        assert recorder.collect(Position(), Timers(), step=1).metrics == {"archive/failures": 1.0}
        assert f"{directory / 'step_2.parquet'} was not written, training continues: No space left" in caplog.text
        assert [path.name for path in directory.iterdir()] == ["step_1.parquet"]
        disk.clear()
        assert recorder.collect(Position(), Timers(), step=2).metrics == {"archive/failures": 0.0}
        assert list(Replay.find(directory, after=2).files) == [3]


EXPERTS = torch.tensor([[0, 3], [1, 2]], dtype=torch.uint8)
SCORED = torch.tensor([[0, 3, 0.5, 0.25], [1, 2, 0.75, 0.125]])


@pytest.mark.parametrize(
    ("routing_replay", "routes", "message"),
    [
        ("none", None, None),
        ("none", SCORED, None),
        ("engine", EXPERTS, None),
        ("engine", SCORED, None),
        ("engine_scores", SCORED, None),
        ("engine", None, "has no routes: write actor_rollout_ref.rollout.routing_replay=none"),
        ("engine_scores", None, "has no routes: write actor_rollout_ref.rollout.routing_replay=none"),
        ("engine_scores", EXPERTS, "has no scores of experts: write actor_rollout_ref.rollout.routing_replay=engine"),
    ],
)
def test_samples_need_the_routes_of_the_actor(
    tmp_path: Path, routing_replay: RoutingReplay, routes: torch.Tensor | None, message: str | None
) -> None:
    keep(tmp_path, 1, routes=routes)
    replay = replace(Replay.find(tmp_path, after=0), routing_replay=routing_replay)
    with world_of_one(), nullcontext() if message is None else pytest.raises(UserError, match=message):
        found = replay.collect(Position(), Timers(), step=0).scored.share.routes
        assert (found is None) == (routes is None)
        assert found is None or torch.equal(found, routes.expand(found.shape))
