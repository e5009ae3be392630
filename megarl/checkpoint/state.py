"""What a run knows beside its models, as a checkpoint keeps it."""

import json
from dataclasses import dataclass
from pathlib import Path

from megarl.data.order import Position


@dataclass(frozen=True)
class State:
    """What a run knows beside its models."""

    step: int = 0  # finished steps
    kl_coef: float | None = None  # None: as configured
    position: Position | None = None  # of the next prompt; None: one batch was taken for each step

    @classmethod
    def read(cls, checkpoint: Path) -> "State":
        """The state that a checkpoint was saved in."""
        state = json.loads((checkpoint / "state.json").read_text())
        position = state.pop("position", None)
        return cls(**state, position=position and Position(**position))
