"""What a user may say about rewards."""

from megarl.section import section


@section
class CustomRewardSection:
    """`custom_reward_function.*`: a function of the user's own instead of the built-in rewards."""

    path: str | None = None
    """Python file that defines it; null = the built-in reward of each row's data source."""
    name: str = "compute_score"
    """Its name: f(data_source, solution_str, ground_truth, extra_info) -> float."""
