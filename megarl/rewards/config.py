"""The sections of the configuration for rewards."""

from typing import Literal

from megarl.section import Bound, Count, Score, Seconds, section


@section
class CustomRewardSection:
    """`custom_reward_function.*`: the user's own function instead of the built-in rewards."""

    path: str | None = None
    """Python file that defines the function; null = the built-in reward of each row's data source."""
    name: str = "compute_score"
    """Name of the function: f(data_source, solution_str, ground_truth, extra_info) -> float."""


@section
class RulesSection:
    """`reward_model.*`, without the model: the rewards of a response, and the limits for computing them."""

    weights: dict[str, Score] | None = None
    """Rules whose weighted sum is the score, by name: a built-in rule, `custom` for the custom function, `data_source`
    for the rule of the row's data source, or `model` for the reward model. Null = the model if it is enabled, else the
    custom function if there is one, else the rule of the row's data source."""
    num_workers: Count = 4
    """Most processes on each rank that call rules; they start when they are needed."""
    timeout_s: Seconds = 10.0
    """Seconds that rules may take for one response; after that their process is killed."""
    max_memory_gb: Bound = 8.0
    """Private memory of a process that calls rules, in 10^9 bytes."""
    on_failure: Literal["mask", "score", "stop"] = "mask"
    """The treatment of a response whose rules take too long, fail or return no finite number: training and metrics
    ignore it (mask), it gets default_score (score), or the run stops (stop)."""
    default_score: Score = 0.0
    """Score of such a response with on_failure=score."""
