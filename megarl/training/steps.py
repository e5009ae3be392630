"""The frame of every training run, from rewards or from files: when a run validates, saves, logs and stops."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.checkpoint.state import State
from megarl.distributed import watchdog
from megarl.distributed.exchange import seconds_waited, waiting
from megarl.distributed.signals import Stopped, stop_requested
from megarl.distributed.sums import exact_sums, extremes
from megarl.platform.memory import peak_memory
from megarl.tracking.names import STEP_SECONDS
from megarl.tracking.profile import Traces
from megarl.tracking.protocol import Tracker
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Checkpoints, Metrics

StepPart = Callable[[int, Timers], Metrics]
"""Do a part of a step, given its number and timers. Return metrics."""


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

    def is_due(self, frequency: int, step: int) -> bool:
        """Return True every `frequency` finished steps and after the last step."""
        return frequency > 0 and (step % frequency == 0 or step == self.last_step)

    def saves(self, step: int, *, is_best: bool) -> bool:
        """Return whether to save after `step` finished steps; `is_best`: its validation is the best so far."""
        is_due = self.save_freq > 0 and step % self.save_freq == 0
        return is_due or (self.save_last and step == self.last_step) or (self.save_best and is_best)


def run_steps(
    schedule: Schedule,
    *,
    step: StepPart,
    validate: StepPart | None,
    state: Callable[[int, Metrics], State],
    tracker: Tracker,
    checkpoints: Checkpoints,
    is_best: Callable[[int], bool] = lambda finished: False,
    summarize: Callable[[Metrics, float], Metrics] = lambda metrics, seconds: {},
) -> None:
    """Run the steps of the schedule.

    Args:
        schedule: the steps, and when to validate and save.
        step: takes a step, numbered from 0.
        validate: validates after so many finished steps; None if there is nothing to validate on.
        state: returns the state to save, given the number of finished steps and the metrics so far.
        tracker: receives the metrics of each step.
        checkpoints: saves the state.
        is_best: tells whether the validation after so many finished steps is the best so far.
        summarize: computes further metrics from those of a step and its duration in seconds.

    Raises:
        Stopped: the job received a signal to end. The last finished step is saved, whatever the schedule says.
    """
    for number in range(schedule.first_step, schedule.last_step):
        watchdog.note(step=number, phase="step")
        timers = Timers()
        start = time.perf_counter()
        with schedule.traces.of_step(number + 1) if schedule.traces else nullcontext():
            metrics = step(number, timers)
            finished = number + 1
        if validate and schedule.is_due(schedule.test_freq, finished):
            metrics |= validate(finished, timers)
        is_stopping = stop_requested() and finished < schedule.last_step
        if is_stopping or schedule.saves(finished, is_best=is_best(finished)):
            with timers("save_checkpoint"):
                checkpoints.save(state(finished, metrics))
        metrics |= checkpoints.advance()
        seconds = time.perf_counter() - start
        metrics = metrics | timers.seconds() | {STEP_SECONDS: seconds} | summarize(metrics, seconds) | _of_all_ranks()
        tracker.log(metrics, step=finished)
        if is_stopping:
            checkpoints.close()
            raise Stopped(finished)
    checkpoints.close()


def _of_all_ranks() -> Metrics:
    """Return the most memory of a rank, and the seconds that a rank has waited for slower ranks in the step."""
    peaks, seconds = peak_memory(), seconds_waited()
    with waiting():
        largest, _ = extremes(torch.tensor([[*peaks.values()]], dtype=torch.float64))
        total = exact_sums(torch.tensor([seconds], dtype=torch.float64))
    metrics = dict(zip(peaks, largest.tolist(), strict=True))
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks > 1:
        metrics["perf/time_lost_to_stragglers"] = float(total) / num_ranks
    return metrics
