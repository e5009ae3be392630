"""The names of the metrics that the console and the plots show; `scripts/metrics.py` describes all metrics."""

from collections.abc import Mapping, Sequence
from typing import Literal

Ending = Literal["finished", "failed", "stopped"]  # of a run; stopped: by a signal, and can be resumed

REWARD = "critic/score/mean"
KL = {  # metric -> its title for people, who see the first of these that a run logs
    "actor/reward_kl_penalty": "kl to reference",
    "actor/kl_loss": "kl to reference",
    "actor/ppo_kl": "kl of update",
}
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
PHASES = {  # phase -> what it does, for people
    "sync": "bringing the weights to the engine",
    "sync_check": "checking the engine's weights",
    "gen": "generating",
    "gen_max": "generating greedy responses",
    "reward": "scoring",
    "old_log_prob": "reading the responses with the actor",
    "ref": "reading the responses with the reference",
    "values": "reading the responses with the critic",
    "adv": "computing advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "step": "learning",
    "testing": "validating",
    "save_checkpoint": "saving a checkpoint",
    "dump_rollout_generations": "writing the samples",
}
WITHIN_GEN = ("sync", "sync_check", "gen_max")  # phases whose time is part of that of `gen`
VALIDATION = ("val-core/", "val/test_score/")


SHORT: Mapping[str, Sequence[str]] = {"train/reward": (REWARD,), "train/kl": tuple(KL), "time/step": (STEP_SECONDS,)}
"""Short names of metrics: each is the first of these that a run has."""


def headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the few numbers that tell at a glance how a run does, by short names, as far as `metrics` have them."""
    found = {}
    scores = validation_of(metrics)
    if scores:
        found["val/score"] = sum(scores.values()) / len(scores)
    for short, names in SHORT.items():
        known = [metrics[name] for name in names if name in metrics]
        if known:
            found[short] = known[0]
    return found


def phases_of(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the phases of `timing_s/` metrics and their seconds, the longest first.

    Phases within `gen` follow it, so that the others add up to the whole step.
    """
    by_phase = {name.removeprefix(TIMING): value for name, value in seconds.items()}

    def rank(phase: str) -> tuple[float, bool, float]:
        is_part = phase in WITHIN_GEN
        return -by_phase.get("gen" if is_part else phase, 0.0), is_part, -by_phase[phase]

    return [(phase, by_phase[phase]) for phase in sorted(by_phase, key=rank)]


def titled(phase: str) -> str:
    """Return the name of a phase in a table, which shows a phase within `gen` as part of it."""
    return f"gen: {phase}" if phase in WITHIN_GEN else phase


def validation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the validation scores among `metrics`, by the rest of their names: the data source."""
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        for prefix in VALIDATION
        if name.startswith(prefix)
    }
