"""The learning rate of each update: a function of its place among the model's own updates, and never 0 by accident."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.faults import Fault
from megarl.config.learning_checks import learning_faults, schedule_faults
from megarl.config.load import load_config
from megarl.learner.config import OptimSection
from megarl.learner.optimizer import make_schedule

ACTOR = "actor_rollout_ref.actor.optim"


def rates(optim: OptimSection, num_updates: int) -> list[float]:
    """Return the rate of each update, as a share of the peak."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0] |= {"wd_mult": 1.0, "lr_mult": 1.0}
    schedule, found = make_schedule(optimizer, optim, num_updates), []
    for _ in range(num_updates):
        schedule.step(1)
        found.append(optimizer.param_groups[0]["lr"] / optim.lr)
    return found


@pytest.mark.parametrize(
    ("optim", "num_updates", "expected"),
    [
        (OptimSection(), 3, [1, 1, 1]),
        (OptimSection(lr_warmup_steps=2), 4, [1 / 2, 1, 1, 1]),
        (OptimSection(lr_warmup_steps_ratio=0.5), 4, [1 / 2, 1, 1, 1]),
        (OptimSection(warmup_style="linear"), 4, [4 / 5, 3 / 5, 2 / 5, 1 / 5]),
        (OptimSection(warmup_style="linear", min_lr_ratio=0.0), 4, [3 / 4, 2 / 4, 1 / 4, 0]),
        (OptimSection(warmup_style="linear", min_lr_ratio=0.5), 4, [7 / 8, 6 / 8, 5 / 8, 4 / 8]),
        (OptimSection(warmup_style="linear", lr_warmup_steps=1), 4, [1, 3 / 4, 2 / 4, 1 / 4]),
        (OptimSection(warmup_style="cosine", lr_warmup_steps=1), 2, [1, 1 / 2]),
        (OptimSection(warmup_style="linear", total_training_steps=8), 3, [8 / 9, 7 / 9, 6 / 9]),
        (OptimSection(warmup_style="linear", total_training_steps=2, min_lr_ratio=0.2), 4, [0.6, 0.2, 0.2, 0.2]),
    ],
)
def test_rates_by_hand(optim: OptimSection, num_updates: int, expected: list[float]) -> None:
    assert rates(optim, num_updates) == pytest.approx(expected)


OPTIMS = st.builds(
    OptimSection,
    lr_warmup_steps=st.none() | st.integers(0, 12),
    lr_warmup_steps_ratio=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    min_lr_ratio=st.sampled_from([None, 0.0, 0.25, 1.0]),
    warmup_style=st.sampled_from(["constant", "linear", "cosine"]),
    total_training_steps=st.integers(-1, 12),
)


@given(optim=OPTIMS, num_updates=st.integers(1, 12))
def test_every_update_has_positive_rate_unless_configured_otherwise(optim: OptimSection, num_updates: int) -> None:
    found = rates(optim, num_updates) if not list(schedule_faults(optim, "optim", num_updates)) else [1.0]
    assert max(found) > 0.0
    if optim.min_lr_ratio != 0.0:
        assert min(found) > 1e-6
    warm_up = optim.num_warm_up(num_updates)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(found[warm_up:], found[warm_up + 1 :], strict=False))


@given(optim=OPTIMS, num_updates=st.integers(2, 12))
def test_last_update_of_decay_has_final_rate(optim: OptimSection, num_updates: int) -> None:
    optim = replace(optim, total_training_steps=-1, warmup_style="cosine", min_lr_ratio=optim.min_lr_ratio or 0.25)
    if not list(schedule_faults(optim, "optim", num_updates)):
        assert math.isclose(rates(optim, num_updates)[-1], optim.min_lr_ratio or 0.0)


def faults(*arguments: str, num_steps: int | None = 10) -> dict[str, str]:
    """Return the faults of a run that learns them after it has read its data."""
    model = ["data.train_files=a", "actor_rollout_ref.model.path=b", "critic.model.path=b"]
    config = load_config([*model, *arguments], world_size=None, check_paths=False)
    found: list[Fault] = list(learning_faults(config, num_steps))
    return {fault.path: fault.message for fault in found}


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["trainer.critic_warmup=10"], "trainer.critic_warmup", "for 10 of 10 steps, so the actor never learns"),
        ([f"{ACTOR}.lr_warmup_steps=100"], f"{ACTOR}.lr_warmup_steps", "takes 100 updates, and the model only has 10"),
        ([f"{ACTOR}.lr_warmup_steps_ratio=1"], f"{ACTOR}.lr_warmup_steps_ratio", "takes 10 updates"),
        (
            ["trainer.critic_warmup=4", f"{ACTOR}.lr_warmup_steps=6"],
            f"{ACTOR}.lr_warmup_steps",
            "takes 6 updates, and the model only has 6",
        ),
        (["critic.optim.lr_warmup_steps=10"], "critic.optim.lr_warmup_steps", "takes 10 updates"),
        (
            [f"{ACTOR}.warmup_style=linear", f"{ACTOR}.total_training_steps=9"],
            f"{ACTOR}.total_training_steps",
            "is 0 after 9 of 10 updates",
        ),
        (
            [f"{ACTOR}.warmup_style=linear", f"{ACTOR}.total_training_steps=1", f"{ACTOR}.min_lr_ratio=0"],
            f"{ACTOR}.min_lr_ratio",
            "never learns",
        ),
    ],
)
def test_a_model_that_cannot_learn_is_a_fault(arguments: list[str], key: str, message: str) -> None:
    found = faults(*arguments)
    assert found.keys() == {key}
    assert message in found[key]
    assert faults(*arguments, num_steps=None) == {}  # until the data are read


@pytest.mark.parametrize(
    "arguments",
    [
        ["trainer.critic_warmup=9"],
        ["trainer.critic_warmup=4", f"{ACTOR}.lr_warmup_steps=5"],
        [f"{ACTOR}.warmup_style=linear", f"{ACTOR}.total_training_steps=9", f"{ACTOR}.min_lr_ratio=0"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "critic.optim.lr_warmup_steps=10"],
    ],
)
def test_a_model_that_learns_is_none(arguments: list[str]) -> None:
    assert faults(*arguments) == {}
