"""Your own rows: JSON, CSV, parquet or Arrow files, or a Hugging Face data set, with columns of any names.

FILE is .jsonl, .json, .csv, .tsv, .parquet or .arrow, or a directory that `Dataset.save_to_disk` wrote, or a data set
of the hub, OWNER/NAME[:CONFIG] or hf://datasets/OWNER/NAME[@REVISION][/FILE].
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace

import click

from megarl.data.messages import prompt_faults, shown
from megarl.data.prepare.options import AT_LEAST_ONE, option
from megarl.data.prepare.tables import Record, records_of
from megarl.data.table import DataRow
from megarl.platform.errors import UserError

MOST_VALIDATION_ROWS = 500
VALIDATION_SHARE = 10
"""The rows from which one is taken for validation, unless a number or a file is given."""
MOST_NAMED = 10  # faults
PLACE = "{prompt}"
SPEAKERS: Mapping[object, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Who speaks in ShareGPT's files and their relatives -> role. Names that are missing are roles themselves."""


OPTIONS = (
    click.Argument(["files"], nargs=-1, required=True, metavar="FILE..."),
    option(
        "--prompt",
        "column of the prompts: texts, messages {role, content}, or ShareGPT's turns {from, value}",
        default="prompt",
        metavar="COL",
    ),
    option(
        "--answer",
        "column of the ground truth, which rewards receive  [default: the last message, if it is the assistant's]",
        metavar="COL",
    ),
    option("--keep", "column for rewards' extra_info; may be repeated", multiple=True, metavar="COL"),
    option("--data-source", "chooses a built-in reward, and names the score", default="own", metavar="NAME"),
    option("--template", f"words around a prompt that is a text, with {PLACE} in them", default=PLACE, metavar="TEXT"),
    option("--system", "a system message before each prompt that is a text", metavar="TEXT"),
    option("--plain", "write texts, not messages: for models without a chat template", is_flag=True),
    option("--train", "most rows to learn from", type=AT_LEAST_ONE, metavar="N"),
    option(
        "--val",
        f"rows for validation, drawn from FILE (default: one in {VALIDATION_SHARE}, at most {MOST_VALIDATION_ROWS})",
        type=int,
        metavar="N",
    ),
    option("--val-from", "file for validation instead", multiple=True, metavar="FILE"),
    option("--split", "split of a data set of the hub that FILE names", default="train"),
    option("--val-split", "the same for --val-from", default="test", metavar="SPLIT"),
    option("--seed", "of the draw", default=1),
    option("--sft", "write prompts and responses, for `megarl sft`; the answer is the response", is_flag=True),
)


def build(arguments: SimpleNamespace) -> dict[str, list[DataRow]]:
    """Return the rows of `train` and `val`.

    Raises:
        UserError: files or columns are missing, prompts are invalid, or a column holds values of several types; names
            all such rows.
    """
    if PLACE not in arguments.template:
        raise UserError(f"--template {arguments.template!r} has no {PLACE}: write it at the place of the prompt")
    if arguments.plain and arguments.system:
        raise UserError("--system is a message, and --plain writes texts: leave out --system or --plain")
    if arguments.val is not None and arguments.val_from:
        raise UserError("--val draws rows from FILE, and --val-from names another file: leave out --val or --val-from")
    train = list(_rows(arguments, arguments.files, "train", arguments.split))
    if arguments.val_from:
        val = list(_rows(arguments, arguments.val_from, "val", arguments.val_split))
    else:
        train, val = _divide(train, arguments.val, seed=arguments.seed)
    splits = {"train": train[: arguments.train]}
    if val:
        splits["val"] = val
    return splits


def _divide(rows: list[DataRow], num_val: int | None, *, seed: int) -> tuple[list[DataRow], list[DataRow]]:
    """Divide rows at random into those to learn from and those to validate with; both keep their order."""
    count = min(len(rows) // VALIDATION_SHARE, MOST_VALIDATION_ROWS) if num_val is None else num_val
    if not 0 <= count < len(rows):
        raise UserError(f"--val {count}: there are {len(rows)} rows, and at least one must be left to learn from")
    drawn = set(random.Random(seed).sample(range(len(rows)), count))
    val = [row | {"extra_info": row["extra_info"] | {"split": "val"}} for i, row in enumerate(rows) if i in drawn]
    return [row for i, row in enumerate(rows) if i not in drawn], val


def _rows(arguments: SimpleNamespace, files: Sequence[str], split: str, hub_split: str) -> Iterator[DataRow]:
    answer = [arguments.answer] if arguments.answer else []
    columns = [arguments.prompt, *answer, *arguments.keep]
    remedies = {arguments.prompt: "--prompt names another", arguments.answer or "": "--answer names another"}
    kinds: dict[str, type] = {}
    names: set[str] = set()
    faults = defaultdict[str, list[str]](list)  # fault -> the places of the rows that have it
    for index, record in enumerate(records_of(files, columns, remedies, split=hub_split)):
        try:
            row = _row(arguments, record, split, index)
            names = names or {*row}
            if names != {*row}:
                raise UserError(
                    f"{record.place}, column {arguments.prompt}: the last message of some conversations is the "
                    "assistant's, and of others not: make all alike, or name the column of the answers with --answer"
                )
            _check_types(record, columns[1:], kinds)
        except UserError as error:
            faults[str(error).removeprefix(record.place)].append(record.place)
        else:
            yield row
    if faults:
        raise UserError("\n".join(_lines(faults)))


def _check_types(record: Record, columns: Sequence[str], kinds: dict[str, type]) -> None:
    """Raise UserError if a value is of another type than those of its column before; enter new types in `kinds`."""
    for name in columns:
        value = record.values[name]
        if value is not None and kinds.setdefault(name, type(value)) is not type(value):
            raise UserError(
                f"{record.place}, column {name}: {value!r} is of type {type(value).__name__}, but rows before have "
                f"{kinds[name].__name__}: write all values alike, for example as texts"
            )


def _lines(faults: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a line for each fault, with the first row that has it and the number of others, for the first faults."""
    for fault, places in islice(faults.items(), MOST_NAMED):
        others = f" (and {len(places) - 1:,} more rows)" if places[1:] else ""
        yield f"{places[0]}{fault}{others}"
    if len(faults) > MOST_NAMED:
        yield f"... and {sum(map(len, [*faults.values()][MOST_NAMED:])):,} more rows with other faults"


def _row(arguments: SimpleNamespace, record: Record, split: str, index: int) -> DataRow:
    prompt: object = _as_usual(record.values[arguments.prompt])
    place = f"{record.place}, column {arguments.prompt}"
    for fault in prompt_faults(prompt):
        raise UserError(f"{place}: {fault}")
    answers = [_as_text(record.values[arguments.answer])] if arguments.answer else []
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if answers:
            raise UserError(f"{place}: the last message is the assistant's, which is the answer: leave out --answer")
        *prompt, last = prompt
        answers = [last["content"]]
        for fault in prompt_faults(prompt):
            raise UserError(f"{place}: without the last message, which is the assistant's: {fault}")
    if isinstance(prompt, str):
        prompt = arguments.template.replace(PLACE, prompt)
        if not arguments.plain:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            prompt = [*system, {"role": "user", "content": prompt}]
    elif arguments.plain or arguments.system or arguments.template != PLACE:
        raise UserError(
            f"{place}: is a list of messages, and --plain, --system and --template are for texts: leave them out"
        )
    if arguments.sft:
        return {"prompt": prompt, "response": _response(answers, record.place), "extra_info": {"split": split}}
    return {
        "data_source": arguments.data_source,
        "prompt": prompt,
        **({"reward_model": {"style": "rule", "ground_truth": answers[0]}} if answers else {}),
        "extra_info": {"split": split, "index": index, **{name: record.values[name] for name in arguments.keep}},
    }


def _response(answers: Sequence[object], place: str) -> str:
    """Return the response of a supervised row. Raises UserError if there is none, or if it is no text."""
    if not answers:
        raise UserError(f"{place}: there is no response: name its column with --answer")
    if not isinstance(answers[0], str) or not answers[0].strip():
        raise UserError(f"{place}: the response is no text: {shown(answers[0])}")
    return answers[0]


def _as_usual(value: object) -> object:
    """Return ShareGPT's turns `{from, value}` as messages `{role, content}`, and any other value as it is."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(turn, dict) and turn.keys() >= {"from", "value"} for turn in value):
        return value
    return [{"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in value]


def _as_text(value: object) -> object:
    """Return the text of an answer that is one message of the assistant, as TRL's completions are; else the value."""
    match _as_usual(value):
        case [{"role": "assistant", "content": str(text)}]:
            return text
    return value
