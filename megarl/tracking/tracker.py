"""Where the numbers of a run go: one protocol, a tracker that is several, and one that is none.

Only one rank tracks; the others hold a `NullTracker`, so that no caller asks which rank it is.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megarl.distributed.signals import Stopped
from megarl.tracking.console import Console
from megarl.tracking.guarded import Guarded
from megarl.tracking.jsonl import Jsonl
from megarl.tracking.names import Ending
from megarl.tracking.wandb import Wandb

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Receives metrics and tables step by step."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Record rows of text and numbers, such as sample responses; all rows have the same keys."""

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Finish the run; `summary_rows` is a last table for people."""


class NullTracker:
    """Records nothing."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing."""

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Do nothing."""

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Do nothing."""


class Trackers:
    """Hands everything on to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step everywhere."""
        for tracker in self._trackers:
            tracker.log(metrics, step=step)

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Record a table everywhere."""
        for tracker in self._trackers:
            tracker.log_table(name, rows, step=step)

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Finish the run everywhere."""
        for tracker in self._trackers:
            tracker.close(summary_rows, ending=ending)


@contextmanager
def recording(tracker: Tracker) -> Iterator[None]:
    """Close `tracker` when the block ends, with how it ended."""
    ending: Ending = "failed"
    try:
        yield
        ending = "finished"
    except Stopped:
        ending = "stopped"
        raise
    finally:
        tracker.close(ending=ending)


def make_tracker(
    names: Sequence[str],
    *,
    run_dir: str | Path,
    project: str,
    experiment: str,
    params: Mapping[str, Any],
    total_steps: int,
    is_main: bool,
    mlflow_tracking_uri: str | None = None,
    resume_step: int | None = None,
    resume_metrics: Mapping[str, float] | None = None,
    same_curve: bool = True,
) -> Tracker:
    """The trackers called `names` (`console`, `jsonl`, `mlflow`, `tensorboard`, `wandb`), or none unless `is_main`.

    `params` is the resolved config. A run that goes on after `resume_step` continues its records, and what they hold of
    later steps is dropped; with None records of an earlier run in `run_dir` are replaced. `resume_metrics` are those of
    that step, recorded where they were not; `same_curve` says whether later steps will have the numbers that they had.
    `mlflow_tracking_uri` is by default the environment's MLFLOW_TRACKING_URI, or else an SQLite file in `run_dir`.
    """
    if not is_main:
        return NullTracker()
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    resume: dict[str, Any] = {"resume_step": resume_step, "resume_metrics": resume_metrics}
    of_run = resume | {"run_dir": run_dir, "project": project, "experiment": experiment, "params": params}
    trackers: list[Tracker] = []
    for name in names:
        if name == "console":
            trackers.append(Console(total_steps=total_steps))
        elif name == "jsonl":
            trackers.append(Jsonl(run_dir, **resume))
        elif name == "mlflow":
            from megarl.tracking.mlflow import Mlflow  # takes seconds to import, and only one rank needs it

            uri = mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
            trackers.append(Mlflow(uri, same_curve=same_curve, **of_run))
        elif name == "tensorboard":
            from megarl.tracking.tensorboard import TensorBoard  # as for mlflow

            trackers.append(Guarded(TensorBoard(run_dir, params=params, **resume), "TensorBoard"))
        elif name == "wandb":
            trackers.append(Guarded(Wandb(same_curve=same_curve, **of_run), "W&B"))
        else:
            raise ValueError(f"trainer.logger: {name!r} is none of console, jsonl, mlflow, tensorboard, wandb")
    return Trackers(trackers)
