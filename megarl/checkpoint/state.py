"""The state of a run except its models, as a checkpoint keeps it.

Everything else is a pure function of the step and the configuration: the engine's sampling seeds, the supervised pairs
of a step, the order of mini-batches.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.directory import STATE_FILE, STEP_PREFIX, latest_step, saved_steps, step_of_name
from megarl.data.order import Position
from megarl.platform.errors import UserError
from megarl.platform.small_files import Damage, read_json

END = 1 << 48
"""More steps, epochs or rows than any run has."""


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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step: a crash may come before they are recorded."""
    mismatches: tuple[float, ...] = ()  # between engine and trainer in the run's first steps
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of this rank by name, for contents that are too large for JSON; `read` does not read them."""

    @property
    def best_step(self) -> int | None:
        """The step of the best validation; None if nothing was validated."""
        return self.best.step if self.best else None

    @classmethod
    def read(cls, checkpoint: Path) -> "State":
        """Read the state in a checkpoint. Raises Damage, also for numbers that no run has and for another step."""
        path = checkpoint / STATE_FILE
        step = step_of_name(checkpoint.resolve().name)
        state = read_json(path, cls)
        fault = next(_faults(state), None)
        if fault:
            raise Damage.in_content(path, fault)
        if step is not None and step != state.step:
            raise Damage.in_content(path, f"it is of step {state.step}, in the checkpoint of step {step}")
        return state


def _faults(state: State) -> Iterator[str]:
    """Yield what cannot be the state of a run."""
    if not 0 <= state.step < END:
        yield f"step {state.step}"
    if state.kl_coef is not None and not 0.0 <= state.kl_coef < math.inf:
        yield f"kl_coef {state.kl_coef}"
    position = state.position
    if position and not (0 <= position.epoch < END and 0 <= position.offset < END):
        yield f"position: epoch {position.epoch}, offset {position.offset}"
    best = state.best
    if best and not (0 <= best.step <= state.step and math.isfinite(best.score)):
        yield f"best: score {best.score} at step {best.step} of {state.step}"
    if not all(0.0 <= mismatch < math.inf for mismatch in state.mismatches):
        yield f"mismatches {', '.join(map(str, state.mismatches))}"


def best_checkpoint(run_dir: Path) -> Path:
    """Return the checkpoint of the best validation of a run, as its newest checkpoint knows it.

    Raises:
        UserError: no validation is known, the best is that of the model before training, or its checkpoint is missing.
        Damage: the newest checkpoint has no readable state.
    """
    steps = saved_steps(run_dir)
    latest = latest_step(run_dir)
    if not steps:
        raise UserError(f"{run_dir} is no run with checkpoints: --best needs the directory of a run that validates")
    newest = run_dir / f"{STEP_PREFIX}{latest if latest in steps else max(steps)}"
    best = State.read(newest).best
    if best is None:
        raise UserError(f"{newest} knows no validation: validate in the run (data.val_files, trainer.test_freq)")
    if best.step == 0:
        raise UserError(
            f"the best validation of {run_dir} is {best.score:g} at step 0: no checkpoint is better than the model "
            "that the run started from"
        )
    if best.step not in steps:
        raise UserError(
            f"the best validation of {run_dir} is {best.score:g} at step {best.step}, but there is no "
            f"{STEP_PREFIX}{best.step}: copy it from the mirror, if there is one, or name another checkpoint"
        )
    return run_dir / f"{STEP_PREFIX}{best.step}"
