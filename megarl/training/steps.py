"""The frame of every training run, from rewards or from files: when a run validates, saves, logs and stops."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.distributed import watchdog
from megarl.distributed.exchange import seconds_waited, waiting
from megarl.distributed.signals import stop_requested
from megarl.distributed.sums import exact_sums, extremes
from megarl.platform.memory import peak_memory
from megarl.tracking.names import STEP_SECONDS
from megarl.tracking.profile import Traces
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Checkpoints, Metrics


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of a run, and when it validates, saves and is traced, in finished steps.

    A frequency of 0 or less means never.
    """

    first_step: int
    last_step: int
    test_freq: int
    save_freq: int
    save_last: bool = False  # whatever `save_freq` is
    save_best: bool = False  # a step whose validation is the best so far, too
    validate_first: bool = False
    traces: Traces | None = None  # of chosen steps; None: no step is traced

    @property
    def numbers(self) -> range:
        """The steps, numbered from 0."""
        return range(self.first_step, self.last_step)

    def traced(self, finished: int) -> AbstractContextManager[None]:
        """Trace the block, after which so many steps are finished, if its step is to be traced."""
        return self.traces.of_step(finished) if self.traces else nullcontext()

    def validates(self, finished: int) -> bool:
        """Return whether to validate after so many finished steps; after the last step too."""
        return self.test_freq > 0 and (finished % self.test_freq == 0 or finished == self.last_step)

    def saves(self, finished: int, *, is_best: bool = False) -> bool:
        """Return whether to save after so many finished steps; `is_best`: their validation is the best so far."""
        is_due = self.save_freq > 0 and finished % self.save_freq == 0
        return is_due or (self.save_last and finished == self.last_step) or (self.save_best and is_best)

    def stops(self, finished: int) -> bool:
        """Return whether a signal ends the run after so many finished steps, before the last. Collective."""
        return stop_requested() and finished < self.last_step


def begin_step(number: int) -> Timers:
    """Begin a step, which is numbered from 0; return its timers."""
    watchdog.note(step=number, phase="step")
    return Timers()


def end_step(timers: Timers, checkpoints: Checkpoints) -> Metrics:
    """Continue asynchronous saves. Return their metrics, the seconds of the step, and its memory. Collective."""
    saved = checkpoints.advance()
    return saved | timers.seconds() | {STEP_SECONDS: timers.elapsed()} | _of_all_ranks()


def _of_all_ranks() -> Metrics:
    """Return the most memory of a rank, and the seconds that a rank has waited for slower ranks in the step."""
    peaks = peak_memory()
    seconds = seconds_waited()
    with waiting():
        largest, _ = extremes(torch.tensor([[*peaks.values()]], dtype=torch.float64))
        total = exact_sums(torch.tensor([seconds], dtype=torch.float64))
    metrics = dict(zip(peaks, largest.tolist(), strict=True))
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks > 1:
        metrics["perf/time_lost_to_stragglers"] = float(total) / num_ranks
    return metrics
