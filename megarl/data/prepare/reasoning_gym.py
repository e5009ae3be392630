"""Any task of reasoning-gym by name (chain_sum, mini_sudoku, ...), scored by the task itself."""

import argparse
import json
from typing import Any

from megarl.rewards.reasoning_gym import SOURCE_PREFIX, compute_score, from_json, load_task, to_json

_TASK = (
    "{question}\nShow your work in <think> </think> tags. And return the final answer, and nothing else, in <answer> "
    "</answer> tags."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this task."""
    parser.add_argument("name", help="of the task in reasoning-gym")
    parser.add_argument("--size", "--train", dest="train", type=int, default=2000, help="training problems")
    parser.add_argument("--val", type=int, default=256, help="validation problems, none of which is a training problem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", default=[], help="settings of the task; VALUE is JSON: max_terms=4"
    )


def build(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The rows of `train` and `val`. Raises ValueError where the task is not to be had or has too few problems."""
    total = arguments.train + arguments.val
    config = _settings(arguments.set)
    task = load_task(arguments.name, json.dumps(config | {"seed": arguments.seed, "size": 2 * total}))
    problems: dict[str, dict[str, Any]] = {}  # by question: none comes twice
    for index in range(2 * total):
        problem = task[index]
        problems.setdefault(problem["question"], problem)
        if len(problems) == total:
            break
    else:
        raise ValueError(
            f"{arguments.name} gave {len(problems)} different problems in {2 * total} draws, {total} were asked for: "
            "ask for fewer, or --set other sizes"
        )
    found = list(problems.values())
    return {
        split: [_row(problem, arguments.name, config, split, index) for index, problem in enumerate(part)]
        for split, part in (("train", found[arguments.val :]), ("val", found[: arguments.val]))
    }


def _settings(words: list[str]) -> dict[str, Any]:
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"--set {word}: write KEY=VALUE with a number, true, false or a JSON text") from error
    return settings


def _row(problem: dict[str, Any], name: str, config: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = {
        "data_source": SOURCE_PREFIX + name,
        "prompt": [{"role": "user", "content": _TASK.format(question=problem["question"])}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": _answer(problem)},
        "extra_info": {
            "split": split,
            "index": index,
            "config": json.dumps(config),
            "metadata": to_json(problem["metadata"]),
        },
    }
    _check(row, problem, name, config)
    return row


def _check(row: dict[str, Any], problem: dict[str, Any], name: str, config: dict[str, Any]) -> None:
    """The scorer must say of the row what it says of the problem: not every task's metadata outlives JSON."""
    answer = _answer(problem)
    expected = float(load_task(name, json.dumps(config)).score_answer(answer, problem))
    try:
        found: float | str = compute_score(row["data_source"], f"<answer>{answer}</answer>", answer, row["extra_info"])
    except Exception as error:  # the scorer may stumble over anything that JSON has changed
        found = repr(error)
    if found != expected or not (answer or from_json(row["extra_info"]["metadata"]) == problem["metadata"]):
        raise ValueError(
            f"reasoning-gym's {name} cannot be kept in a file: its own answer scores {found} there, and {expected} as "
            "it was made, or its metadata changes"
        )


def _answer(problem: dict[str, Any]) -> str:
    """The task's own answer; '' where it has none, as many are right."""
    return "" if problem["answer"] is None else str(problem["answer"])
