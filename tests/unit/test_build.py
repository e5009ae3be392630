"""What a configuration and a checkpoint say about the course of a run."""

import pytest

from megarl.algorithms.config import KLControlSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.build.run import make_kl_controller, make_schedule
from megarl.checkpoint.state import State
from megarl.tracking.config import TrainerSection


@pytest.mark.parametrize(
    ("trainer", "resumed", "last_step", "validates_first"),
    [
        (TrainerSection(), False, 9, True),
        (TrainerSection(val_before_train=False), False, 9, False),
        (TrainerSection(), True, 9, False),  # it was validated when it was at this step before
        (TrainerSection(val_only=True), False, 4, True),
        (TrainerSection(val_only=True, val_before_train=False), True, 4, True),
    ],
)
def test_schedule(trainer: TrainerSection, resumed: bool, last_step: int, validates_first: bool) -> None:
    schedule = make_schedule(trainer, first_step=4, last_step=9, resumed=resumed)
    assert schedule.first_step == 4
    assert schedule.last_step == last_step
    assert schedule.validate_first == validates_first


def test_a_fixed_coefficient_is_the_configured_one_and_an_adaptive_one_goes_on() -> None:
    adaptive = KLControlSection(type="adaptive", kl_coef=0.1, target_kl=0.02, horizon=50)
    assert make_kl_controller(adaptive, State()) == AdaptiveKL(0.1, target=0.02, horizon=50)
    assert make_kl_controller(adaptive, State(step=3, kl_coef=0.07)) == AdaptiveKL(0.07, target=0.02, horizon=50)
    fixed = KLControlSection(kl_coef=0.3)
    assert make_kl_controller(fixed, State(step=3, kl_coef=0.07)) == FixedKL(0.3)
