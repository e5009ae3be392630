"""The sections of the configuration for rewards."""

from dataclasses import field
from typing import Any, Literal

from megarl.mark import REWARD, RULES, Change, Effect, key, when
from megarl.section import Bound, Count, CountFromZero, Score, Seconds, section

AT_ONCE = Change(Effect.NONE, "how many responses are scored at once")
NO_ENVIRONMENT = when("environment.name", None, why="as the environment gives the rewards")
OF_RULES = (RULES, NO_ENVIRONMENT)
OF_FUNCTION = when("custom_reward_function.path")

JUDGE_TEMPLATE = """Judge the response to a question.

Question:
{prompt}

Reference answer (may be empty):
{ground_truth}

Response:
{solution_str}

How good is the response, from 0 (useless or wrong) to 1 (complete and right)? Reason briefly. End with a line that
says `Score: ` and one number, and nothing else."""


@section(REWARD)
class CustomRewardSection:
    """`custom_reward_function.*`: the user's own function instead of the built-in rewards."""

    path: str | None = None
    """Python file that defines the function; null = built-in rewards."""
    name: str = "compute_score"
    """The function f(data_source, solution_str, ground_truth, extra_info) -> float, or another form of
    docs/rewards.md."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function or of the class's constructor."""


@section(REWARD)
class JudgeSection:
    """`reward_model.judge.*`: a language model behind a server that gives responses a number."""

    url: str | None = None
    """Base of an OpenAI-compatible server, such as http://host:8000/v1."""
    model: str = ""
    """Name of the model on the server."""
    template: str = JUDGE_TEMPLATE
    """Question, with {prompt}, {solution_str}, {ground_truth}, {data_source} or {extra_info[KEY]}; other braces are
    doubled."""
    pattern: str = r"[*_# ]*(?i:score)[*_ ]*:[*_ ]*([^\s*_]+?)[*_. ]*"
    """Regular expression for the complete last non-empty line of the reply; its one group is the number."""
    lowest: Score = 0.0
    """Least score; a smaller number is no verdict."""
    highest: Score = 1.0
    """Greatest score; a greater number is no verdict."""
    api_key_variable: str | None = key(None, Change(Effect.NONE, "the variable that holds the judge's key"))
    """Environment variable with the server's key."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request; temperature is 0 unless given."""
    attempt_s: Seconds = 60.0
    """Seconds of a request; reward_model.timeout_s limits all requests for a response."""
    num_attempts: Count = 4
    """Most requests for a response, at growing intervals."""
    cache: str | None = key(None, Change(Effect.NONE, "the place of the judge's replies"))
    """Directory that keeps the judge's replies; null = none."""


@section(REWARD)
class RulesSection:
    """`reward_model.*`, without the model: the rewards of a response, and the limits for computing them."""

    weights: dict[str, Score] | None = None
    """Rules with their weights: built-in names, `custom`, `judge`, `data_source` or `model`. null = the first that
    there is of model, custom, judge and data_source."""
    judge: JudgeSection = key(JudgeSection, read_if=when(".judge.url"))
    """A language model behind a server."""
    isolation: Literal["response", "process"] = key("response", read_if=(*OF_RULES, OF_FUNCTION))
    """response = a process scores one response, or one batch, and ends; process = it scores one after another."""
    canary_every: CountFromZero = key(
        100,
        Change(Effect.NONE, "how often a reward is checked, not its scores"),
        read_if=(RULES, when(".isolation", "process"), NO_ENVIRONMENT, OF_FUNCTION),
    )
    """Calls after which a known wrong response is scored; 0 = never."""
    skip_special_tokens: bool = key(True, read_if=OF_RULES)
    """Leave end-of-sequence tokens out of the text of a response."""
    num_workers: Count = key(4, AT_ONCE, read_if=OF_RULES)
    """Most processes on each rank that call rules."""
    concurrency: Count = key(64, AT_ONCE, read_if=OF_RULES)
    """Most responses that an asynchronous function, a batch function or the judge handles at once."""
    timeout_s: Seconds = key(10.0, read_if=OF_RULES)
    """Seconds that rules may take for a response."""
    max_memory_gb: Bound = key(8.0, read_if=OF_RULES)
    """Memory of a process that calls rules, in 10^9 bytes."""
    on_failure: Literal["mask", "score", "stop"] = key("mask", read_if=OF_RULES)
    """A failed response is ignored (mask), gets default_score (score), or stops the run (stop)."""
    default_score: Score = key(0.0, read_if=(RULES, when(".on_failure", "score"), NO_ENVIRONMENT))
    """Score of a response whose rules fail."""
    show_prints: bool = key(False, Change(Effect.NONE, "what the console shows"), read_if=OF_RULES)
    """Show the prints of the rules of rank 0 on the console too."""
    trial_rows: CountFromZero = key(
        10, Change(Effect.NONE, "how many rows the reward is tried on before the run"), read_if=OF_RULES
    )
    """Rows that the rules are tried on before a run; 0 = none, and no check of ground truths."""


def isolation_of(section: RulesSection, custom: CustomRewardSection) -> Literal["response", "process"]:
    """Return what a process scores: `process` (many responses) without a function of the user, as no rule runs one."""
    return section.isolation if custom.path else "process"
