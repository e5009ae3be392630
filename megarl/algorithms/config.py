"""What a user may say about rewards over time: advantages and the penalty for leaving the reference."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.section import section

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@section
class KLControlSection:
    """`algorithm.kl_ctrl.*`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """A constant, or a controller that steers the divergence to target_kl."""
    kl_coef: NonNegativeFloat = 0.005
    """The coefficient, or its first value."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive controller corrects."""
    target_kl: PositiveFloat = 0.1
    """Divergence the adaptive controller aims at."""


@section
class AlgorithmSection:
    """`algorithm.*`."""

    adv_estimator: Literal["gae", "grpo"] = "gae"
    """Advantages from a critic (PPO) or from the other responses to the same prompt (GRPO)."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """Lambda of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's advantages by their standard deviation; false = Dr.GRPO."""
    use_kl_in_reward: bool | None = None
    """Subtract the divergence from the reference from the reward; null = not actor.use_kl_loss."""
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3"] = "kl"
    """Its estimator; k1 = kl, k2 = mse, k3 = low_var_kl."""
    kl_ctrl: KLControlSection = field(default_factory=KLControlSection)
    """Its coefficient."""
