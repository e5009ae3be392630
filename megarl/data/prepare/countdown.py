"""Countdown problems that have a solution: reach a target, using every given number once."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import SimpleNamespace

import click

from megarl.data.prepare.options import AT_LEAST_ONE, Several, option
from megarl.data.table import DataRow
from megarl.platform.errors import UserError

MAX_TRIES = 1000  # draws in a row without a new problem, after which no problem is left

_TASK = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the final "
    "answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
_BASE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
    "User: {task}\nAssistant: Let me solve this step by step.\n<think>"
)
_SYSTEM = (
    "You are a helpful assistant. You first think about the reasoning process in the mind and then provide the user "
    "with the answer."
)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


@dataclass(frozen=True)
class Problem:
    """Numbers, the target, and one way to reach it."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Identifies the problem, whatever the order of the numbers and the solution."""
        return tuple(sorted(self.numbers)), self.target


OPTIONS = (
    option("--train", "training problems", default=2000),
    option("--val", "validation problems, distinct from those of other splits", default=256),
    option("--sft", "solved problems for supervised warm-up: sft.parquet", default=0),
    option(
        "--careless",
        "share, below 1, of further warm-up responses that just join the numbers by the last operator: a habit "
        "to unlearn",
        default=0.0,
    ),
    Several(
        ["--num-numbers"],
        type=AT_LEAST_ONE,
        default=[3],
        show_default=True,
        help="how many numbers; several = any of them",
    ),
    option("--max-number", "largest given number", type=AT_LEAST_ONE, default=20),
    option("--max-target", "largest target", default=100),
    option("--operators", "operators that the solutions use", default="+-*/"),
    option("--seed", default=1),
    option(
        "--template",
        "plain: '3 5 8 = 16 :', for tiny models that write it alone (rule countdown/bare); base: a text "
        "to continue; qwen-instruct: chat messages (rule countdown)",
        type=click.Choice(["plain", "base", "qwen-instruct"]),
        default="plain",
    ),
)


def build(arguments: SimpleNamespace) -> dict[str, list[DataRow]]:
    """Return the rows of `train`, `val` and, if asked for, `sft`. Raises UserError if there are too few problems."""
    if not arguments.operators or set(arguments.operators) - set(_PRECEDENCE):
        raise UserError(f"--operators {arguments.operators!r}: give one or more of + - * /")
    if not 0.0 <= arguments.careless < 1.0:
        raise UserError(f"--careless {arguments.careless}: give a share from 0 to below 1")
    total = arguments.train + arguments.val + arguments.sft
    problems = list(_distinct(arguments, total))
    if len(problems) < total:
        raise UserError(
            f"only about {len(problems)} distinct problems exist under these options, {total} were asked for: "
            "raise --max-number, --max-target or --num-numbers, or ask for fewer"
        )
    ends = (arguments.val, arguments.val + arguments.train)  # validation first: more training data does not change it
    val = problems[: ends[0]]
    train = problems[ends[0] : ends[1]]
    sft = problems[ends[1] :]
    splits = {
        name: [_row(problem, arguments.template, name, index) for index, problem in enumerate(part)]
        for name, part in (("train", train), ("val", val))
    }
    if sft:
        num_careless = round(arguments.careless / (1.0 - arguments.careless) * len(sft))
        wrong = (careless(problem, arguments.operators[-1]) for problem in islice(cycle(sft), num_careless))
        splits["sft"] = [
            {"prompt": prompt(problem, arguments.template), "response": response(problem, arguments.template)}
            for problem in (*sft, *wrong)
        ]
    return splits


def careless(problem: Problem, operator: str) -> Problem:
    """Return the problem with its numbers, joined by `operator`, as the solution."""
    return replace(problem, solution=operator.join(map(str, problem.numbers)))


def prompt(problem: Problem, template: str) -> str | list[dict[str, str]]:
    """Return the prompt: a text, or the messages of a chat."""
    if template == "plain":
        return f"{' '.join(map(str, problem.numbers))} = {problem.target} :"
    task = _TASK.format(numbers=list(problem.numbers), target=problem.target)
    if template == "base":
        return _BASE.format(task=task)
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]


def response(problem: Problem, template: str) -> str:
    """Return the response of a model that knows the solution."""
    if template == "plain":
        return problem.solution
    opening = "" if template == "base" else "<think>"
    return f"{opening} {problem.solution} = {problem.target} </think>\n<answer> {problem.solution} </answer>"


def draw(rng: random.Random, *, num_numbers: int, max_number: int, operators: str) -> Problem | None:
    """Join random numbers by random operators until one value is left; return None if that takes a fraction."""
    numbers = [rng.randint(1, max_number) for _ in range(num_numbers)]
    pool = [(number, str(number), _ATOM) for number in numbers]
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        operator = rng.choice(operators)
        if operator == "/" and (right[0] == 0 or left[0] % right[0] != 0):
            return None
        value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[operator](
            left[0], right[0]
        )
        rank = _PRECEDENCE[operator]
        first = left[1] if left[2] >= rank else f"({left[1]})"
        # a - (b + c) and a / (b * c) need their parentheses, a + (b + c) does not
        is_bare = right[2] > rank or (right[2] == rank and operator in "+*")
        second = right[1] if is_bare else f"({right[1]})"
        pool.append((value, f"{first}{operator}{second}", rank))
    return Problem(numbers=tuple(numbers), target=pool[0][0], solution=pool[0][1])


def _distinct(arguments: SimpleNamespace, total: int) -> Iterator[Problem]:
    rng = random.Random(arguments.seed)
    seen: set[object] = set()
    tries = 0
    while len(seen) < total and tries < MAX_TRIES:
        tries += 1
        num_numbers = rng.choice(arguments.num_numbers)
        problem = draw(rng, num_numbers=num_numbers, max_number=arguments.max_number, operators=arguments.operators)
        if problem is not None and 0 < problem.target <= arguments.max_target and problem.key not in seen:
            seen.add(problem.key)
            tries = 0
            yield problem


def _row(problem: Problem, template: str, split: str, index: int) -> DataRow:
    return {
        "data_source": "countdown/bare" if template == "plain" else "countdown",
        "prompt": prompt(problem, template),
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": problem.target, "numbers": list(problem.numbers)},
        },
        "extra_info": {"split": split, "index": index},
    }
