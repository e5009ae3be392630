"""When a run saves: every N-th step, the last step, and a step whose validation is the best so far."""

from typing import Any

import pytest

from megarl.checkpoint.state import Best, State
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
