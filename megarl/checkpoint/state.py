"""The state of a run except its models, as a checkpoint keeps it.

Everything else is a pure function of the step and the configuration: the engine's sampling seeds, the supervised pairs
of a step, the order of mini-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.manifest import STATE_FILE
from megarl.data.order import Position
from megarl.platform.small_files import read_json


@dataclass(frozen=True)
class Best:
    """The best validation of a run, the first if several are equal."""

    score: float  # mean of the data sources' mean scores
    step: int

    def or_better(self, other: "Best | None") -> "Best":
        """Return the better of the two; `other` is the earlier one, and wins a tie."""
        return self if other is None or self.score > other.score else other


@dataclass(frozen=True)
class State:
    """The state of a run except its models."""

    step: int  # finished steps
    kl_coef: float | None = None  # None: as configured
    position: Position | None = None  # of the next prompt; None: each step took one batch
    best: Best | None = None  # None: nothing was validated
    metrics: Mapping[str, float] = field(
        default_factory=dict
    )  # of the last step: a crash may come before they are recorded
    mismatches: tuple[float, ...] = ()  # between engine and trainer in the run's first steps
    files: Mapping[str, bytes] = field(default_factory=dict)  # what is too large for JSON, as files of the checkpoint
    # by name; `read` does not read them

    @classmethod
    def read(cls, checkpoint: Path) -> "State":
        """Read the state in a checkpoint. Raises Damage."""
        return read_json(checkpoint / STATE_FILE, cls)
