"""Iterations that are kept in files, and those that learn from them again instead of sampling.

An iteration that is replayed from the weights it had, under the same configuration, learns bit for bit the same; from
other weights, or with another loss, it shows what they make of the same samples.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.root import Config
from megarl.data.order import Position
from megarl.tracking.timers import Timers
from megarl.training.archive import Archive, read_samples, step_of, steps_in
from megarl.training.collect import Collected, SampleSource

logger = logging.getLogger(__name__)


def replaying(config: Config) -> Config:
    """What a replay does otherwise than its run: it keeps records of its own, and no samples and no checkpoints."""
    trainer = config.trainer
    trainer = replace(
        trainer,
        default_local_dir=f"{trainer.default_local_dir}/replay",
        experiment_name=f"{trainer.experiment_name}-replay",
        rollout_data_dir=None,
        save_freq=-1,
        test_freq=-1,
        val_before_train=False,
        val_only=False,
    )
    return replace(config, trainer=trainer)


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Collects as another does, and keeps what it collects."""

    samples: SampleSource
    archive: Archive

    def collect(self, position: Position, timers: Timers, *, step: int) -> Collected:
        """As the other; the iteration's file is there when this returns, or `archive/failures` is 1. Collective."""
        collected = self.samples.collect(position, timers, step=step)
        with timers("dump_rollout_generations"):
            kept = self.archive.keep_iteration(collected.scored, collected.baselines, step=step + 1)
        return replace(collected, metrics=collected.metrics | {"archive/failures": float(not kept)})


@dataclass(frozen=True)
class Replay:
    """Samples of earlier iterations; neither engine nor reward is asked."""

    files: Mapping[int, Path]  # by iteration, counted from 1; none is missing between the first and the last

    @classmethod
    def find(cls, path: Path, *, after: int) -> "Replay":
        """The iteration in a file, or all those in a directory that follow the first `after`.

        Where a file's samples were drawn after another number of iterations, a warning says so.

        Raises:
            ValueError: the next iteration is not in the directory, or one after it is missing.
        """
        if not path.is_dir():
            step = step_of(path)
            if step != after + 1:
                logger.warning(
                    "%s has the samples of iteration %d, which weights after %d iterations drew; they are learnt from "
                    "with the weights after %d. The checkpoint is chosen by trainer.resume_mode and resume_from_path",
                    path,
                    step,
                    step - 1,
                    after,
                )
            return cls({step: path})
        found = steps_in(path)
        files = {step: file for step, file in found.items() if step > after}
        if list(files) != list(range(after + 1, after + 1 + len(files))) or not files:
            raise ValueError(
                f"{path} does not have the iterations that follow number {after}, from which the weights are, or there "
                f"is a gap: it has {', '.join(map(str, found)) or 'none'}. Name one file, or begin with other weights "
                "(trainer.resume_mode=disable, or resume_path with trainer.resume_from_path)"
            )
        return cls(files)

    @property
    def first_step(self) -> int:
        """Iterations before the first that is replayed."""
        return min(self.files) - 1

    @property
    def last_step(self) -> int:
        """Iterations when the last one is replayed."""
        return max(self.files)

    def collect(self, position: Position, timers: Timers, *, step: int) -> Collected:
        """What iteration `step`, counted from 0, learnt from."""
        with timers("gen"):
            scored, baselines = read_samples(self.files[step + 1])
        return Collected(scored=scored, baselines=baselines, position=position, metrics={})
