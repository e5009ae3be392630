"""What a run knows beside its models, as a checkpoint keeps it.

What is not here is a pure function of the step and the configuration: the seeds that the engine samples with, the
supervised pairs of a step, the order of mini-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.manifest import STATE_FILE
from megarl.data.order import Position
from megarl.platform.small_files import read_json


@dataclass(frozen=True)
class Best:
    """The best validation of a run, the first of several equal ones."""

    score: float  # mean of the data sources' mean scores
    step: int

    def or_better(self, other: "Best | None") -> "Best":
        """Whichever of the two is better; `other` is the earlier one."""
        return self if other is None or self.score > other.score else other


@dataclass(frozen=True)
class State:
    """What a run knows beside its models."""

    step: int  # finished steps
    kl_coef: float | None = None  # None: as configured
    position: Position | None = None  # of the next prompt; None: one batch was taken for each step
    best: Best | None = None  # None: nothing was validated
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last step: a crash may come before its records
    mismatches: tuple[float, ...] = ()  # between engine and trainer in the run's first iterations

    @classmethod
    def read(cls, checkpoint: Path) -> "State":
        """Return the state that a checkpoint was saved in. Raises Damage."""
        return read_json(checkpoint / STATE_FILE, cls)
