"""The command `megarl prepare`: makes the files of a known task or of the user's own rows, or checks a file."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import megarl
from megarl.data.columns import Needs, PromptColumns
from megarl.data.config import DataSection
from megarl.data.messages import as_read, as_written, encode_prompt
from megarl.data.origins import as_note
from megarl.data.parquet import write_rows
from megarl.data.prepare import (
    check,
    countdown,
    gsm8k,
    math,
    own,
    preferences,
    reasoning_gym,
)
from megarl.data.prepare.hub_data import HubData
from megarl.data.remote_tokenizer import find_tokenizer
from megarl.data.table import DataRow
from megarl.platform.arguments import Arguments
from megarl.platform.errors import UserError, placed
from megarl.platform.functions import load_module
from megarl.platform.secrets import guard_output, redact
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.signature import fault_in_file

EXAMPLES = Path(megarl.__file__).resolve().parents[1] / "examples" / "tasks"
"""Further tasks, which only a checkout has: a file each."""
TASKS: Mapping[str, Any] = {
    "countdown": countdown,
    "gsm8k": gsm8k,
    "math": math,
    "own": own,
    "preferences": preferences,
    "reasoning-gym": reasoning_gym,
}
"""Task -> a module with the functions `add_arguments` and `build`; its docstring is the help."""
SUMMARY = "Make the files of a known task or of your own rows, or check a file."
EXAMPLE = """\
megarl prepare countdown --out data/countdown
megarl prepare own mine.csv --prompt question --answer solution --out data/mine
megarl prepare --check data/mine/train.parquet"""
NEEDED = {
    "own": "mine.csv --prompt question --answer solution",
    "preferences": "--from pairs.jsonl --held-out 500",
    "reasoning-gym": "chain_sum",
    "tinystories": "--from stories.jsonl",
    "tinystories-sentiment": "--from stories.jsonl",
}
"""Task -> the arguments of its example, if it cannot do without."""
SHOWN_FAULTS = 20
SHOWN_ROWS = 3
COUNTED_ROWS = 1000
"""Prompts that are shown as the model reads them, and prompts whose tokens are counted."""


def main(argv: Sequence[str] | None = None) -> None:
    """Read `argv`, by default the command line; write `DIR/SPLIT.parquet` of every split, or check a file."""
    options = parser()
    arguments = options.parse_args(argv)
    if (arguments.check is None) == (arguments.task is None):
        options.error(f"name a task ({', '.join(tasks())}), or a file to --check")
    if arguments.check is not None:
        report = check.examine(arguments.check, _columns(arguments), arguments.kind)
        _check(arguments.check, [*_custom_faults(arguments), *report.faults], report)
        return
    try:
        if arguments.tokenizer:
            _find(arguments.tokenizer)
        splits = arguments.build(arguments)
        note = as_note(_hub_datasets(arguments))
        for split, rows in splits.items():
            path = arguments.out / f"{split}.parquet"
            write_rows(path, rows, note)
            print(f"{path}: {len(rows)} rows")
        _show(splits, arguments.tokenizer)
    except UserError as error:
        options.exit(2, redact(f"{options.prog}: {error}\n"))


@lru_cache(maxsize=1)
def tasks() -> Mapping[str, Any]:
    """Return the tasks of the package and those of a checkout; report an example that fails to load."""
    found = dict(TASKS)
    for file in sorted(EXAMPLES.glob("*.py")):
        try:
            found[file.stem.replace("_", "-")] = load_module(file, key="megarl prepare")
        except UserError as error:
            print(f"note: {redact(str(error))}", file=sys.stderr)
    return found


def parser() -> Arguments:
    """Return the tasks with their options, and the options of a check."""
    root = Arguments(prog="megarl prepare", description=SUMMARY, example=EXAMPLE)
    root.add_argument(
        "--check",
        metavar="FILE",
        help="list the faults of a parquet or JSON file of prompts, supervised pairs or preference pairs, by row",
    )
    root.add_argument(
        "--kind",
        choices=list(check.READERS),
        help="the use of the checked file, in place of the one that its columns tell: rl for megarl train, sft for "
        "megarl sft, preference for megarl train-reward",
    )
    checked = root.add_argument_group("Options of a run that reads the checked file")
    checked.add_argument("--prompt-key", default="prompt", help="column of the prompts (data.prompt_key)")
    checked.add_argument("--reward-fn-key", default="data_source", help="column that picks the built-in reward")
    checked.add_argument(
        "--custom-reward-function",
        metavar="FILE",
        help="Python file whose function or class scores instead of built-in rewards; its signature is checked",
    )
    checked.add_argument(
        "--custom-reward-name",
        default=CustomRewardSection.name,
        metavar="NAME",
        help="name of the function or class in that file (custom_reward_function.name)",
    )
    checked.add_argument(
        "--reward-kwarg",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a further argument of it (custom_reward_function.reward_kwargs); may be repeated",
    )
    checked.add_argument("--reward-model", action="store_true", help="a reward model scores alone")
    named = root.add_subparsers(dest="task", title="Tasks", metavar="TASK", prog=root.prog)
    for name, task in tasks().items():
        task_parser = named.add_parser(name, help=task.__doc__, description=task.__doc__, example=_example(name))
        task_parser.add_argument(
            "--out", "--output", type=Path, required=True, metavar="DIR", help="directory of the parquet files"
        )
        task_parser.add_argument(
            "--tokenizer", metavar="DIR", help="show prompts as the model with this tokenizer reads them"
        )
        task.add_arguments(task_parser)
        task_parser.set_defaults(build=task.build)
    return root


def _example(task: str) -> str:
    arguments = f"{NEEDED[task]} " if task in NEEDED else ""
    return f"megarl prepare {task} {arguments}--out data/{task}"


def _hub_datasets(arguments: argparse.Namespace) -> list[str]:
    """Return the ids of the data sets of the hub that the training rows come from."""
    names = [*getattr(arguments, "files", []), *([arguments.source] if hasattr(arguments, "source") else [])]
    found = (HubData.named(str(name)) for name in names)
    return [data.id for data in found if data]


def _find(tokenizer: str) -> None:
    """Raise UserError if there is no such file or directory and the hub does not give the tokenizer."""
    with placed("--tokenizer: "):
        find_tokenizer(tokenizer, with_code=False)


def _show(splits: Mapping[str, Sequence[DataRow]], place: str | None) -> None:
    """Print the first prompts, with the tokenizer at `place` as its model reads them, and the longest prompt."""
    split, rows = next(iter(splits.items()))
    if place is None:
        for number, row in enumerate(islice(rows, SHOWN_ROWS)):
            print(as_written(f"row {number} of {split}", row["prompt"]))
            _show_truth(row)
        print("--tokenizer DIR shows prompts as the model with this tokenizer reads them, and counts tokens")
        return
    from megarl.data.tokenizer import load_tokenizer  # imports transformers

    tokenizer = load_tokenizer(place)
    lengths = []
    for number, row in enumerate(islice(rows, COUNTED_ROWS)):
        token_ids = encode_prompt(row["prompt"], tokenizer)
        lengths.append(len(token_ids))
        if number < SHOWN_ROWS:
            print(as_read(f"row {number} of {split}", row["prompt"], token_ids, tokenizer))
            _show_truth(row)
    print(f"longest of {len(lengths)} prompts: {max(lengths)} tokens, the least for data.max_prompt_length")


def _show_truth(row: DataRow) -> None:
    truth = row.get("reward_model")
    if truth:
        print(redact(f"  its ground truth: {truth['ground_truth']!r}"))


def _columns(arguments: argparse.Namespace) -> PromptColumns:
    """Return the columns as a run with such options would read them."""
    section = DataSection(
        train_files=arguments.check, prompt_key=arguments.prompt_key, reward_fn_key=arguments.reward_fn_key
    )
    custom = CustomRewardSection(path=arguments.custom_reward_function, name=arguments.custom_reward_name)
    return PromptColumns(section=section, needs=Needs.of(None if arguments.reward_model else RulesSection(), custom))


def _custom_faults(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the fault of the user's reward, as far as its file shows it without being run."""
    file = arguments.custom_reward_function
    name = arguments.custom_reward_name
    if file and not Path(file).is_file():
        yield f"--custom-reward-function: no such file: {file}"
    elif file and (fault := fault_in_file(Path(file), name, arguments.reward_kwarg)):
        yield fault


def _check(file: str, faults: Sequence[str], report: check.CheckReport) -> None:
    """Print the faults and remarks of a file; exit with 1 if there are faults."""
    for lines, beginning in ((faults, ""), (report.notes, "note: ")):
        for line in lines[:SHOWN_FAULTS]:
            print(redact(f"{beginning}{line}"))
        if len(lines) > SHOWN_FAULTS:
            print(f"... and {len(lines) - SHOWN_FAULTS} more")
    if faults:
        raise SystemExit(1)
    print(f"{redact(file)}: no faults in the {check.READERS[report.kind]}")


if __name__ == "__main__":
    guard_output()
    main()
