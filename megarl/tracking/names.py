"""The metric names that people look at first. Names follow the field's own; any other name is logged all the same."""

from collections.abc import Mapping
from typing import Literal

Ending = Literal["finished", "failed", "stopped"]  # of a run; stopped: told to end, and can go on

REWARD = "critic/score/mean"
KL = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")  # the first that a run logs
TOKENS = "perf/total_num_tokens"  # prompts and responses of a step, over all ranks
STEP_SECONDS = "timing_s/step"
TIMING = "timing_s/"
LEARNT = {  # what runs that learn from files log -> what people read
    "sft/loss": "loss",
    "reward_model/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "val/loss": "held-out loss",
    "val/accuracy": "held-out accuracy",
}
VALIDATION = ("val-core/", "val/test_score/")


def validation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The validation scores among `metrics`, by data source and whatever else their names say."""
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        for prefix in VALIDATION
        if name.startswith(prefix)
    }
