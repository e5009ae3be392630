"""The facts that trackers need about the run that they record."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it: its directory, its names, its configuration, and the step it resumes from."""

    run_dir: Path
    project: str
    experiment: str
    params: Mapping[str, object]  # the resolved configuration
    resume_step: int | None = None  # None: a new run, which replaces the records in `run_dir`
    resume_metrics: Mapping[str, float] | None = None  # of that step, recorded unless the records have that step
    mlflow_tracking_uri: str | None = None  # None: that of the environment, or the file of the project
    same_curve: bool = True  # whether later steps will repeat the numbers that they had before

    @property
    def first_step(self) -> int:
        """The first step that this process records."""
        if self.resume_step is None:
            return 0
        return self.resume_step if self.resume_metrics else self.resume_step + 1
