"""The command `megarl prepare`: makes the files of a known task or of the user's own rows, or checks a file."""

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click

import megarl
from megarl.commands.cli.command import Command, complain, parse
from megarl.commands.cli.table import PREPARE
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
from megarl.data.prepare.options import option, single_values
from megarl.data.remote_tokenizer import find_tokenizer
from megarl.data.table import DataRow
from megarl.platform.errors import UserError, placed
from megarl.platform.files import check_writable, explained
from megarl.platform.functions import load_module
from megarl.platform.secrets import redact
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.signature import fault_in_file

EXAMPLES = Path(megarl.__file__).resolve().parents[1] / "examples" / "tasks"
"""Further tasks, which only a checkout has: a file each."""
TASKS: Mapping[str, ModuleType] = {
    "countdown": countdown,
    "gsm8k": gsm8k,
    "math": math,
    "own": own,
    "preferences": preferences,
    "reasoning-gym": reasoning_gym,
}
"""Task -> a module with `OPTIONS` and a function `build`; its docstring is the help."""
OF_ALL = (
    option(
        "--out --output",
        "directory of the parquet files",
        type=click.Path(path_type=Path),
        required=True,
        metavar="DIR",
    ),
    option("--tokenizer", "show prompts as the model with this tokenizer reads them", metavar="DIR"),
)
"""The options of every task."""
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


class Task(Command):
    """The command of a task."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; an option may have several values."""
        return super().parse_args(ctx, list(single_values(self.params, args)))


def main(argv: Sequence[str] | None = None) -> None:
    """Read `argv`, by default the command line; write `DIR/SPLIT.parquet` of every split, or check a file."""
    arguments, task = read_words(sys.argv[1:] if argv is None else argv)
    if task is None:
        report = check.examine(arguments.check, _columns(arguments), arguments.kind)
        _check(arguments.check, [*_custom_faults(arguments), *report.faults], report)
        return
    try:
        check_writable(arguments.out, "--out")
        if arguments.tokenizer:
            _find(arguments.tokenizer)
        splits = task.build(arguments)
        note = as_note(_hub_datasets(arguments))
        for split, rows in splits.items():
            path = arguments.out / f"{split}.parquet"
            with explained(str(path)):
                write_rows(path, rows, note)
            print(f"{path}: {len(rows)} rows")
        for path in _of_earlier_calls(arguments.out, splits):
            print(redact(f"note: {path} is of an earlier call, and its rows may be in the files above: remove it"))
        _show(splits, arguments.tokenizer)
        if task is own and not arguments.sft:
            for line in check.remarks([str(arguments.out / f"{split}.parquet") for split in splits]):
                print(redact(f"note: {line}"))
    except UserError as error:
        print(redact(f"megarl prepare: {error}"), file=sys.stderr)
        sys.exit(2)


def read_words(argv: Sequence[str]) -> tuple[SimpleNamespace, ModuleType | None]:
    """Return the options of a check and None, or those of a task and the module of the task."""
    checked = parse(PREPARE, argv)
    name, *words = checked["words"] or (None,)
    if (checked["check"] is None) == (name is None):
        complain(click.UsageError(f"name a task ({', '.join(tasks())}), or a file to --check"))
    if name is None:
        return SimpleNamespace(**checked), None
    if name not in tasks():
        close = get_close_matches(name, tasks(), n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(map(repr, tasks()))}"
        complain(click.UsageError(f"there is no task {name!r}: {meant}"))
    return SimpleNamespace(**parse(command_of(name), words)), tasks()[name]


@lru_cache(maxsize=1)
def tasks() -> Mapping[str, ModuleType]:
    """Return the tasks of the package and those of a checkout; report an example that fails to load."""
    found = dict(TASKS)
    for file in sorted(EXAMPLES.glob("*.py")):
        try:
            found[file.stem.replace("_", "-")] = load_module(file, key="megarl prepare")
        except UserError as error:
            print(f"note: {redact(str(error))}", file=sys.stderr)
    return found


def command_of(name: str) -> Command:
    """Return the declaration of a task."""
    task = tasks()[name]
    needed = f"{NEEDED[name]} " if name in NEEDED else ""
    return Task(
        f"prepare {name}",
        *OF_ALL,
        *getattr(task, "OPTIONS", ()),
        module=__name__,
        section="",
        text=task.__doc__ or "",
        example=f"megarl prepare {name} {needed}--out data/{name}",
    )


def _hub_datasets(arguments: SimpleNamespace) -> list[str]:
    """Return the ids of the data sets of the hub that the training rows come from."""
    names = [*getattr(arguments, "files", [])]
    if hasattr(arguments, "source"):
        names.append(arguments.source)
    found = (HubData.named(str(name)) for name in names)
    return [data.id for data in found if data]


def _of_earlier_calls(out: Path, splits: Container[str]) -> list[Path]:
    """Return the files of other splits in a directory, which nobody would expect to belong to other data."""
    return [path for path in sorted(out.glob("*.parquet")) if path.stem not in splits]


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


def _columns(arguments: SimpleNamespace) -> PromptColumns:
    """Return the columns as a run with such options would read them."""
    section = DataSection(
        train_files=arguments.check, prompt_key=arguments.prompt_key, reward_fn_key=arguments.reward_fn_key
    )
    custom = CustomRewardSection(path=arguments.custom_reward_function, name=arguments.custom_reward_name)
    return PromptColumns(section=section, needs=Needs.of(None if arguments.reward_model else RulesSection(), custom))


def _custom_faults(arguments: SimpleNamespace) -> Iterator[str]:
    """Yield the fault of the user's reward, as far as its file shows it without being run."""
    file = arguments.custom_reward_function
    name = arguments.custom_reward_name
    if file and not Path(file).is_file():
        yield f"--custom-reward-function: no such file: {file}"
    elif file:
        fault = fault_in_file(Path(file), name, arguments.reward_kwarg)
        yield from [fault] if fault else []


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
