"""Records the samples of steps in files, and replays steps from such files instead of sampling.

A step that is replayed from its own weights, under the same configuration, learns bit for bit the same. With other
weights or another loss, a replay shows what they learn from the same samples.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megarl.config.root import Config
from megarl.data.order import Position
from megarl.distributed.sharded import Shares
from megarl.platform.errors import UserError
from megarl.rollout.config import RoutingReplay
from megarl.samples.in_flight import NOTHING, InFlight
from megarl.samples.reading import read_samples, step_of
from megarl.samples.store import SampleStore, is_one_step, steps_in
from megarl.tracking.config import REPLAY
from megarl.tracking.timers import Timers
from megarl.training.collect import Collected, SampleSource

logger = logging.getLogger(__name__)


def replaying(config: Config) -> Config:
    """Return the configuration of a replay: it writes records of its own, and neither samples nor checkpoints."""
    trainer = config.trainer
    trainer = replace(
        trainer,
        default_local_dir=f"{trainer.default_local_dir}/{REPLAY}",
        experiment_name=f"{trainer.experiment_name}-replay",
        rollout_data_dir=None,
        save_freq=-1,
        save_last=False,
        save_best=False,
        test_freq=-1,
        val_before_train=False,
        val_only=False,
    )
    return replace(config, trainer=trainer)


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """A source of samples that also writes them to a store."""

    samples: SampleSource
    store: SampleStore

    def collect(self, position: Position, timers: Timers, *, step: int, in_flight: InFlight = NOTHING) -> Collected:
        """Collect and write the samples of a step. `archive/failures` is 1 if the disk refused them. Collective."""
        collected = self.samples.collect(position, timers, step=step, in_flight=in_flight)
        with timers("dump_rollout_generations"):
            kept = self.store.save_step(collected.scored, collected.baselines, step=step + 1)
        return replace(collected, metrics=collected.metrics | {"archive/failures": float(not kept)})


@dataclass(frozen=True)
class Replay:
    """Samples of earlier steps, which need neither engine nor reward."""

    files: Mapping[int, Path]  # by step, counted from 1, without gaps
    routing_replay: RoutingReplay = "none"  # what the actor takes of the samples' routes

    @classmethod
    def find(cls, path: Path, *, after: int) -> "Replay":
        """Find the step in a file, or all steps in a directory that follow step `after`.

        Warn if the samples of a single file were not drawn after `after` steps.

        Raises:
            UserError: the directory lacks the next step, or has a gap after it.
        """
        if is_one_step(path):
            step = step_of(path)
            if step != after + 1:
                logger.warning(
                    "%s has the samples of step %d, which were drawn with the weights after %d steps, but this replay "
                    "has the weights after %d. trainer.resume_mode and resume_from_path choose the checkpoint",
                    path,
                    step,
                    step - 1,
                    after,
                )
            return cls({step: path})
        found = steps_in(path)
        files = {step: file for step, file in found.items() if step > after}
        if list(files) != list(range(after + 1, after + 1 + len(files))) or not files:
            raise UserError(
                f"the weights are those after {after} steps, but {path} lacks the next step or has a gap after it: "
                f"it has {', '.join(map(str, found)) or 'no steps'}. Name one file, or start from other weights "
                "(trainer.resume_mode=disable, or resume_path with trainer.resume_from_path)"
            )
        return cls(files)

    @property
    def first_step(self) -> int:
        """Finished steps before the first replayed step."""
        return min(self.files) - 1

    @property
    def last_step(self) -> int:
        """Finished steps after the last replayed step."""
        return max(self.files)

    def collect(self, position: Position, timers: Timers, *, step: int, in_flight: InFlight = NOTHING) -> Collected:
        """Return the samples of step `step`, counted from 0. Raises UserError if they lack routes or scores."""
        path = self.files[step + 1]
        with timers("gen"):
            scored, baselines = read_samples(path, Shares.blocks(1))
        self._check_routes(scored.share.routes, path)
        return Collected(scored=scored, baselines=baselines, position=position, metrics={})

    def _check_routes(self, routes: Tensor | None, path: Path) -> None:
        """Check that the samples of a file have the routes that the actor takes. Raises UserError."""
        key = "actor_rollout_ref.rollout.routing_replay"
        if self.routing_replay == "none":
            return
        if routes is None:
            raise UserError(f"{path} has no routes: write {key}=none")
        if self.routing_replay == "engine_scores" and not routes.is_floating_point():
            raise UserError(f"{path} has no scores of experts: write {key}=engine")
