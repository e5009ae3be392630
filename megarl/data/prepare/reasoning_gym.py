"""Any task of reasoning-gym by name (chain_sum, mini_sudoku, ...), scored by the task itself.

NAME is the name of the task in reasoning-gym.
"""

import json
from types import SimpleNamespace

import click

from megarl.data.prepare.options import Several, option
from megarl.data.table import DataRow
from megarl.platform.errors import UserError
from megarl.rewards.reasoning_gym import SOURCE_PREFIX, compute_score, from_json, load_task, to_json

_TASK = (
    "{question}\nShow your work in <think> </think> tags. And return the final answer, and nothing else, in <answer> "
    "</answer> tags."
)


OPTIONS = (
    click.Argument(["name"], metavar="NAME"),
    option("--size --train train", "training problems", default=2000),
    option("--val", "validation problems, distinct from training problems", default=256),
    option("--seed", default=1),
    Several(["--set"], metavar="KEY=VALUE ...", help="settings of the task; VALUE is JSON: max_terms=4"),
)


def build(arguments: SimpleNamespace) -> dict[str, list[DataRow]]:
    """Return the rows of `train` and `val`. Raises UserError if the task is refused or has too few problems."""
    total = arguments.train + arguments.val
    config = _settings(arguments.set)
    task = load_task(arguments.name, json.dumps(config | {"seed": arguments.seed, "size": 2 * total}))
    problems: dict[str, DataRow] = {}  # by question: all are distinct
    for index in range(2 * total):
        problem = task[index]
        problems.setdefault(problem["question"], problem)
        if len(problems) == total:
            break
    else:
        raise UserError(
            f"{arguments.name} gave {len(problems)} different problems in {2 * total} draws, {total} were asked for: "
            "ask for fewer, or --set other sizes"
        )
    found = list(problems.values())
    return {
        split: [_row(problem, arguments.name, config, split, index) for index, problem in enumerate(part)]
        for split, part in (("train", found[arguments.val :]), ("val", found[: arguments.val]))
    }


def _settings(words: list[str]) -> dict[str, object]:
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"--set {word}: write KEY=VALUE with a number, true, false or a JSON text") from error
    return settings


def _row(problem: DataRow, name: str, config: dict[str, object], split: str, index: int) -> DataRow:
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


def _check(row: DataRow, problem: DataRow, name: str, config: dict[str, object]) -> None:
    """Check that the row gets the same score as the problem: JSON changes the metadata of some tasks."""
    answer = _answer(problem)
    expected = float(load_task(name, json.dumps(config)).score_answer(answer, problem))
    try:
        found: float | str = compute_score(row["data_source"], f"<answer>{answer}</answer>", answer, row["extra_info"])
    except Exception as error:  # the scorer may fail on anything that JSON has changed
        found = repr(error)
    keeps_answer = answer or from_json(row["extra_info"]["metadata"]) == problem["metadata"]
    if found != expected or not keeps_answer:
        raise UserError(
            f"reasoning-gym's {name} cannot be kept in a file: its own answer scores {found} from the file, but "
            f"{expected} before, or its metadata changes"
        )


def _answer(problem: DataRow) -> str:
    """Return the task's own answer; '' if it has none because many answers are correct."""
    return "" if problem["answer"] is None else str(problem["answer"])
