"""Checks that every model of a run can learn: its updates, its warm-up, the end of its decay.

A model takes one update of its schedule in each step in which it learns. The number of steps may follow from the data;
a run then repeats these checks when it has read them.
"""

from collections.abc import Iterator

from megarl.config.faults import Fault
from megarl.config.keys import CRITIC_WARM_UP
from megarl.config.root import Config, SupervisedConfig
from megarl.learner.config import OptimSection


def actor_updates(config: Config, num_steps: int) -> int:
    """Return the steps in which the actor learns, of a run of `num_steps` steps."""
    return num_steps - config.trainer.critic_warmup


def learning_faults(config: Config | SupervisedConfig, num_steps: int | None) -> Iterator[Fault]:
    """Check all models of a run of `num_steps` steps; None: the number is not known yet."""
    if not isinstance(config, Config):
        yield from schedule_faults(config.optim, "optim", num_steps)
        return
    warm_up = config.trainer.critic_warmup
    if num_steps is not None and not config.trainer.val_only and config.has_critic and warm_up >= num_steps:
        yield Fault(
            CRITIC_WARM_UP,
            f"the critic warms up for {warm_up} of {num_steps} steps, so the actor never learns: write less, "
            "or train for longer (trainer.total_training_steps, trainer.total_epochs)",
        )
        return
    of_actor = None if num_steps is None else actor_updates(config, num_steps)
    yield from schedule_faults(config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim", of_actor)
    if config.has_critic:
        yield from schedule_faults(config.critic.optim, "critic.optim", num_steps)


def schedule_faults(optim: OptimSection, where: str, num_updates: int | None) -> Iterator[Fault]:
    """Check the schedule of a model that takes `num_updates` updates; None: the number is not known yet."""
    if 0 < optim.total_training_steps < (optim.lr_warmup_steps or 0):
        yield Fault(
            f"{where}.lr_warmup_steps",
            f"{optim.lr_warmup_steps} steps of warm-up exceed {where}.total_training_steps="
            f"{optim.total_training_steps}: shorten it",
        )
        return
    if num_updates is None:
        return
    warm_up = optim.num_warm_up(num_updates)
    length = optim.length(num_updates)
    if 0 < num_updates <= warm_up:
        key = "lr_warmup_steps_ratio" if optim.lr_warmup_steps is None else "lr_warmup_steps"
        yield Fault(
            f"{where}.{key}",
            f"the warm-up takes {warm_up} updates, and the model only has {num_updates}: shorten it, or train "
            "for longer (trainer.total_training_steps, trainer.total_epochs)",
        )
    elif optim.decays and optim.min_lr_ratio is None and length < num_updates:
        yield Fault(
            f"{where}.total_training_steps",
            f"the learning rate is 0 after {length} of {num_updates} updates: write a longer schedule, or the "
            f"rate to continue with in {where}.min_lr_ratio",
        )
    elif optim.decays and optim.min_lr_ratio == 0.0 and warm_up == 0 and length == 1:
        yield Fault(
            f"{where}.min_lr_ratio",
            "the schedule has one update, and this is its rate, so the model never learns: write more than 0",
        )
