"""What a user may say about rewards."""

from typing import Literal

from megarl.section import Bound, Count, Score, Seconds, section


@section
class CustomRewardSection:
    """`custom_reward_function.*`: a function of the user's own instead of the built-in rewards."""

    path: str | None = None
    """Python file that defines it; null = the built-in reward of each row's data source."""
    name: str = "compute_score"
    """Its name: f(data_source, solution_str, ground_truth, extra_info) -> float."""


@section
class RulesSection:
    """`reward_model.*`, without the model: which rewards a response gets, and what computing them may cost."""

    weights: dict[str, Score] | None = None
    """Rules whose weighted sum is the score, by name: a built-in one, `custom`, `data_source` for that of the row, or
    `model` for the reward model. Null = the model where one is enabled, else the custom function where there is one,
    else the rule of the row's data source."""
    num_workers: Count = 4
    """Processes on each rank that call rules at most; they start as they are needed."""
    timeout_s: Seconds = 10.0
    """Seconds that rules may take for one response; then their process is killed."""
    max_memory_gb: Bound = 8.0
    """Private memory of a process that calls rules, in 10^9 bytes."""
    on_failure: Literal["mask", "score", "stop"] = "mask"
    """What becomes of a response whose rules took too long, failed or gave no finite number: it is left out of
    everything that is learnt or measured (mask), it gets default_score (score), or the run stops (stop)."""
    default_score: Score = 0.0
    """Score of such a response with on_failure=score."""
