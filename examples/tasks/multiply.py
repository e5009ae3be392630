"""Products of two random integers."""

import random
from types import SimpleNamespace
from typing import Any

import click

from megarl.data.prepare.options import option
from megarl.platform.errors import UserError

_TASK = (
    "What is {a} * {b}? Show your work in <think> </think> tags. And return the final answer, a number and nothing "
    "else, in <answer> </answer> tags, for example <answer> 42 </answer>."
)


OPTIONS = (
    option("--train", "training problems", default=2000),
    option("--val", "validation problems, distinct from training problems", default=256),
    option("--digits", "digits of either factor", default=3),
    option("--seed", default=1),
    option(
        "--template",
        "plain: '12 * 34 =', for tiny models; chat: messages",
        type=click.Choice(["plain", "chat"]),
        default="chat",
    ),
)


def build(arguments: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `train` and `val`. Raises UserError if there are too few problems."""
    if not 1 <= arguments.digits <= 9:
        raise UserError(f"--digits {arguments.digits}: give 1 to 9")
    low = 10 ** (arguments.digits - 1)
    high = 10**arguments.digits
    total = arguments.train + arguments.val
    exist = (high - low) ** 2
    if total > exist:
        raise UserError(f"only {exist} problems exist, {total} were asked for: raise --digits, or ask for fewer")
    # distinct numbers of problems; drawn one by one, so that asking for more does not change the first problems
    rng = random.Random(arguments.seed)
    seen = dict[int, None]()
    while len(seen) < total:
        seen.setdefault(rng.randrange(exist))
    factors = [(low + number // (high - low), low + number % (high - low)) for number in seen]
    return {
        split: [_row(a, b, arguments.template, split, index) for index, (a, b) in enumerate(part)]
        for split, part in (("train", factors[arguments.val :]), ("val", factors[: arguments.val]))
    }


def _row(a: int, b: int, template: str, split: str, index: int) -> dict[str, Any]:
    text = f"{a} * {b} =" if template == "plain" else _TASK.format(a=a, b=b)
    return {
        "data_source": "multiply",
        "prompt": text if template == "plain" else [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": a * b},
        "extra_info": {"split": split, "index": index},
    }
