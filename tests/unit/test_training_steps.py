"""When a run saves: every N-th step, the last step, and a step whose validation is the best so far."""

import time
from functools import partial
from typing import Any

import pytest

from megarl.checkpoint.state import Best, State
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Metrics
from megarl.training.steps import Schedule, run_steps
from tests.support.loop import Diary, Records
from tests.support.ranks import world_of_one

SCORES = {1: 0.2, 2: 0.9, 3: 0.9, 4: 1.0, 5: 0.1}


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, []),
        ({"save_last": True}, [5]),
        ({"save_freq": 3}, [3]),
        ({"save_freq": 3, "save_last": True}, [3, 5]),
        ({"save_best": True}, [1, 2, 4]),
        ({"save_best": True, "test_freq": 3}, [3]),
        ({"save_best": True, "test_freq": -1}, []),
        ({"save_best": True, "save_freq": 2, "save_last": True}, [1, 2, 4, 5]),
    ],
    ids=str,
)
def test_the_steps_that_are_saved(changes: dict[str, Any], saved: list[int]) -> None:
    schedule = Schedule(**{"first_step": 0, "last_step": 5, "test_freq": 1, "save_freq": -1, **changes})
    diary, best = Diary(), list[Best]()

    def validate(finished: int, _: object) -> Metrics:
        best[:] = [Best(SCORES[finished], finished).or_better(best[0] if best else None)]
        return {}

    with world_of_one():
        run_steps(
            schedule,
            step=lambda *_: {},
            validate=validate,
            state=lambda finished, metrics: State(step=finished, metrics=metrics),
            tracker=Records(diary),
            checkpoints=Records(diary),
            is_best=lambda finished: bool(best) and best[0].step == finished,
        )
    assert diary.steps_of("save") == saved


def test_seconds_of_step_contain_its_phases() -> None:
    diary = Diary()

    def wait(_: int, timers: Timers, phase: str = "testing") -> Metrics:
        with timers(phase):
            time.sleep(0.01)
        return {}

    with world_of_one():
        run_steps(
            Schedule(first_step=0, last_step=2, test_freq=1, save_freq=1),
            step=partial(wait, phase="gen"),
            validate=wait,
            state=lambda finished, metrics: State(step=finished, metrics=metrics),
            tracker=Records(diary),
            checkpoints=Records(diary),
        )
    for metrics in diary.logged.values():
        seconds = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
        total = seconds.pop("timing_s/step")
        assert set(seconds) == {"timing_s/gen", "timing_s/testing", "timing_s/save_checkpoint"}
        assert total >= sum(seconds.values()) > 0.02
