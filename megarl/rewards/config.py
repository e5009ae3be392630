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
    """Python file that defines the function; null = the built-in reward of each row's data source."""
    name: str = "compute_score"
    """Name of the function: f(data_source, solution_str, ground_truth, extra_info) -> float. It may be asynchronous, or
    take lists (data_sources, solution_strs, ground_truths, extra_infos), or be a class with a method like that."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, or the arguments of the class's constructor."""


@section(REWARD)
class JudgeSection:
    """`reward_model.judge.*`: a language model behind a server that gives responses a number."""

    url: str | None = None
    """Base of an OpenAI-compatible server, such as http://host:8000/v1; null = no judge."""
    model: str = ""
    """Name of the model on the server."""
    template: str = JUDGE_TEMPLATE
    """The question to the judge: a text with {prompt}, {solution_str} (the response), {ground_truth}, {data_source} or
    {extra_info[KEY]}. Write other braces twice."""
    pattern: str = r"[*_# ]*(?i:score)[*_ ]*:[*_ ]*([^\s*_]+?)[*_. ]*"
    """Regular expression with one group. It must match the whole last line of the judge's reply that is not empty, at
    most 512 characters, and its group must be one number, which is the score."""
    lowest: Score = 0.0
    """Least score; a smaller number is no verdict."""
    highest: Score = 1.0
    """Greatest score; a greater number is no verdict."""
    api_key_variable: str | None = key(None, Change(Effect.NONE, "the variable that holds the judge's key"))
    """Environment variable that holds the server's key; null = the server needs none."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as {max_tokens: 512}; temperature is 0 unless it is given."""
    attempt_s: Seconds = 60.0
    """Seconds that one request may take. reward_model.timeout_s limits all requests for a response together."""
    num_attempts: Count = 4
    """Most requests for a response: another follows, later and later, if the server is away, busy, fails or sends no
    chat completion."""
    cache: str | None = key(None, Change(Effect.NONE, "the place of the judge's replies"))
    """Directory that keeps the judge's replies, so that nothing is asked twice; null = replies are not kept."""


@section(REWARD)
class RulesSection:
    """`reward_model.*`, without the model: the rewards of a response, and the limits for computing them."""

    weights: dict[str, Score] | None = None
    """Rules whose weighted sum is the score, by name: a built-in rule, `custom` for the custom function, `judge` for
    the judge, `data_source` for the rule of the row's data source, or `model` for the reward model. Null = the model if
    it is enabled, else the custom function if there is one, else the judge if there is one, else the rule of the row's
    data source."""
    judge: JudgeSection = key(JudgeSection, read_if=when(".judge.url"))
    """A language model behind a server."""
    isolation: Literal["response", "process"] = key("response", read_if=(*OF_RULES, OF_FUNCTION))
    """response = a process that calls the custom function scores one response, or those that the function takes
    together, and no other; process = it scores one after another, so that a response may change the scores of later
    ones. Built-in rules and the judge run no response, and always have `process`."""
    canary_every: CountFromZero = key(
        100,
        Change(Effect.NONE, "how often a reward is checked, not its scores"),
        read_if=(RULES, when(".isolation", "process"), NO_ENVIRONMENT, OF_FUNCTION),
    )
    """Calls after which isolation=process scores a wrong response that it knows: if that earns more than at first, the
    run stops. 0 = never."""
    skip_special_tokens: bool = key(True, read_if=OF_RULES)
    """Leave the end-of-sequence token out of the text of a response. Other special tokens that the policy has written
    are always part of the text."""
    num_workers: Count = key(4, AT_ONCE, read_if=OF_RULES)
    """Most processes on each rank that call rules; they start when they are needed."""
    concurrency: Count = key(64, AT_ONCE, read_if=OF_RULES)
    """Most responses that one process handles at once. An asynchronous function and the judge work on that many, and a
    batch function receives up to that many. Other rules handle one at a time."""
    timeout_s: Seconds = key(10.0, read_if=OF_RULES)
    """Seconds that rules may take for one response; after that their process is killed."""
    max_memory_gb: Bound = key(8.0, read_if=OF_RULES)
    """Private memory of a process that calls rules, in 10^9 bytes."""
    on_failure: Literal["mask", "score", "stop"] = key("mask", read_if=OF_RULES)
    """The treatment of a response whose rules take too long, fail or return no finite number: training and metrics
    ignore it (mask), it gets default_score (score), or the run stops (stop)."""
    default_score: Score = key(0.0, read_if=(RULES, when(".on_failure", "score"), NO_ENVIRONMENT))
    """Score of such a response with on_failure=score."""
    trial_rows: CountFromZero = key(
        10, Change(Effect.NONE, "how many rows the reward is tried on before the run"), read_if=OF_RULES
    )
    """Rows that the rules are tried on before a training run starts, each with its ground truth as the response;
    0 = none, and no look at the ground truths and prompts of all rows."""


def isolation_of(section: RulesSection, custom: CustomRewardSection) -> Literal["response", "process"]:
    """Return what a process scores: `process` (many responses) without a function of the user, as no rule runs one."""
    return section.isolation if custom.path else "process"
