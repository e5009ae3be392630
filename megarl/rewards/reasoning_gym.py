"""reasoning-gym: any of its procedural tasks, scored by the task itself (Stojanovski et al. 2025, arXiv 2505.24760).

The data source is `reasoning_gym/NAME`, and the ground truth is the task's own answer. `extra_info` has further inputs
of the task's scorer, as JSON: `metadata` of the problem (see `to_json`) and `config` of the task. A task is refused if
its scorer would run a response or the data file as code, or accepts the same answer for every problem. Needs
`pip install reasoning-gym==0.1.25`.
"""

import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megarl.platform.errors import UserError
from megarl.rewards.tags import answer_of

SOURCE_PREFIX = "reasoning_gym/"
_TUPLE, _ITEMS = "(tuple)", "(items)"  # the only key of an object that encodes a tuple, or a dict
REMEDY = "needs `pip install reasoning-gym==0.1.25`"

_EVAL = "its scorer gives the response to Python's eval"
_SYMPY = "its scorer gives the response to sympy's parse_expr, which ends in Python's eval"
_DATA = "its scorer gives the data file to Python's eval"
_WON = "is correct to its scorer, whatever the problem"
REFUSED: Mapping[str, str] = {
    "binary_matrix": _EVAL,
    "bitwise_arithmetic": _DATA,
    "coin_flip": f"its scorer compares the first digits, so the answer 0 {_WON}",
    "complex_arithmetic": f"the answer nan {_WON}",
    "composite": "it is other tasks mixed: prepare each of them, and name all their files",
    "countdown": f"{_SYMPY}; megarl has a countdown task of its own",
    "game_of_life_halting": f"any word {_WON}",
    "intermediate_integration": _SYMPY,
    "n_queens": _EVAL,
    "number_sorting": _DATA,
    "polynomial_multiplication": _SYMPY,
    "puzzle24": f"{_SYMPY}; countdown with four numbers is the same game",
    "simple_integration": _SYMPY,
    "spiral_matrix": _EVAL,
    "string_insertion": _EVAL,
}
"""Name of a task -> the reason why it is refused."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the content of the last `<answer>...</answer>` of a response by the task's own rule, from 0 to 1.

    A response without these tags gets the task's score for no answer. Raises UserError if the task is refused or
    unknown, or the package is missing.
    """
    info = extra_info or {}
    task = load_task(data_source.removeprefix(SOURCE_PREFIX), info.get("config") or "{}")
    answer, tagged = answer_of(solution_str)
    entry = {"answer": str(ground_truth), "metadata": from_json(info["metadata"])}
    return float(task.score_answer(answer.strip() if tagged else None, entry))


def right_answer(ground_truth: object) -> str | None:
    """Return a response that the task pays; None if the task has no answer of its own."""
    return f"<answer>{ground_truth}</answer>" if ground_truth not in (None, "") else None


def answer_in(text: str) -> str:
    """Return the answer that is scored, with single spaces; '' if there is none."""
    answer, tagged = answer_of(text)
    return " ".join(answer.split()) if tagged else ""


def to_json(value: object) -> str:
    """Return a JSON text that preserves values that JSON alone would change: tuples, and keys that are not strings."""
    return json.dumps(_marked(value), default=str)


def from_json(text: str) -> Any:
    """Return the value that `to_json` received."""
    return json.loads(text, object_hook=_unmarked)


def _marked(value: object) -> object:
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(item) for item in value]}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _marked(item) for key, item in value.items()}
    return {_ITEMS: [[_marked(key), _marked(item)] for key, item in value.items()]}


def _unmarked(value: dict[str, Any]) -> object:
    if value.keys() == {_TUPLE}:
        return tuple(value[_TUPLE])
    return dict(value[_ITEMS]) if value.keys() == {_ITEMS} else value


@lru_cache(maxsize=64)
def load_task(name: str, config: str) -> Any:
    """Return the task `name` of reasoning-gym with the settings of the JSON object `config`.

    Raises UserError if the task is refused or unknown, or does not accept the settings.
    """
    if name in REFUSED:
        raise UserError(f"reasoning-gym's {name} is refused: {REFUSED[name]}")
    try:
        factory = importlib.import_module("reasoning_gym.factory")
        importlib.import_module("reasoning_gym")  # registers the tasks
    except ImportError as error:
        raise UserError(f"the data source {SOURCE_PREFIX}{name} {REMEDY} ({error})") from error
    if name not in factory.DATASETS:
        names = ", ".join(sorted(factory.DATASETS.keys() - REFUSED))
        raise UserError(f"reasoning-gym has no task {name!r}; it has {names}")
    try:
        return factory.create_dataset(name, **json.loads(config))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"reasoning-gym's {name} does not accept {config}: {error}") from error
