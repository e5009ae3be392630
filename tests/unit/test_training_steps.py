"""The metrics of a step."""

import time

from megarl.training.steps import begin_step, end_step
from tests.support.loop import Diary, Records
from tests.support.ranks import world_of_one


def test_seconds_of_step_contain_its_phases() -> None:
    phases = ("gen", "testing", "save_checkpoint")
    with world_of_one():
        timers = begin_step(0)
        for phase in phases:
            with timers(phase):
                time.sleep(0.01)
        metrics = end_step(timers, Records(Diary()))
    seconds = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
    total = seconds.pop("timing_s/step")
    assert set(seconds) == {f"timing_s/{phase}" for phase in phases}
    assert total >= sum(seconds.values()) > 0.02
