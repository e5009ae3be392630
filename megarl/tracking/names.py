"""The names of the metrics that the console and the plots show; `metrics` describes all metrics."""

from collections.abc import Mapping
from typing import Literal

Ending = Literal["finished", "failed", "stopped"]  # of a run; stopped: by a signal, and can be resumed

REWARD = "critic/score/mean"
KL = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")  # the first of these that a run logs
TOKENS = "perf/total_num_tokens"  # prompts and responses of a step, over all ranks
STEP_SECONDS = "timing_s/step"
TIMING = "timing_s/"
LEARNT = {  # metric of a run that learns from files -> its title for people
    "sft/loss": "loss",
    "reward_model/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "val/loss": "held-out loss",
    "val/accuracy": "held-out accuracy",
}
VALIDATION = ("val-core/", "val/test_score/")


def validation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the validation scores among `metrics`, by the rest of their names: the data source."""
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        for prefix in VALIDATION
        if name.startswith(prefix)
    }
