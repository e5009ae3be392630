"""Reads the problems of published data sets: from a directory, a file, or a data set of the Hugging Face hub."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import click
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.prepare.hub_data import HubData
from megarl.data.prepare.options import AT_LEAST_ONE, option
from megarl.data.table import DataRow
from megarl.platform.errors import UserError, placed

SPLITS = {"train": "train", "val": "test"}  # our name, and the name in the data sets
KINDS = ("jsonl", "jsonl.gz", "parquet", "json")


EXTRACTION = option(
    "--extraction",
    "the number of a response that counts: the number after '####', or the last",
    type=click.Choice(["strict", "flexible"]),
    default="strict",
)


def source_options(default: str) -> tuple[click.Option, ...]:
    """Return the options for the source and the number of problems."""
    return (
        option(
            "--from source",
            "directory with files *train*.jsonl and *test*.jsonl (or .parquet, .json, or folders of such names "
            "with one problem per .json), one such file, for training problems alone, or a data set of the hub, "
            "OWNER/NAME[:CONFIG] or hf://datasets/OWNER/NAME[@REVISION][/FILE]",
            default=default,
        ),
        option("--train", "most training problems", type=AT_LEAST_ONE),
        option("--val", "most validation problems", type=int),
    )


def rows_of(
    arguments: SimpleNamespace, make_row: Callable[[DataRow, str, str, int], DataRow]
) -> dict[str, list[DataRow]]:
    """Return the rows of `train` and `val`, each `make_row(problem, place, split, index)`.

    Raises UserError if files are missing or cannot be read, and the hub has no such data set.
    """
    data = HubData.named(arguments.source)
    place = Path(arguments.source)
    splits = SPLITS
    if place.is_file() or (data and data.file):
        splits = {"train": ""}
    rows = {}
    for split, name in splits.items():
        with placed("--from: "):
            files = data.files(name, KINDS) if data else _files_of(place, name)
        found = ((f"{file}, row {number}", problem) for file in files for number, problem in problems_of(file))
        problems = enumerate(islice(found, getattr(arguments, split)))
        rows[split] = [make_row(problem, where, split, index) for index, (where, problem) in problems]
    return rows


def _files_of(directory: Path, split: str) -> list[Path]:
    if directory.is_file():
        return [directory]
    word = re.compile(rf"(?<![a-z]){split}(?![a-z])", re.IGNORECASE)
    for kind in KINDS:
        matching = sorted(directory.rglob(f"*{split}*.{kind}"))
        found = [path for path in matching if word.search(path.name)] or matching  # `latest-train` is no test
        # the hub's copy of GSM8K has a second wording of the same problems besides `main`
        main = [path for path in found if path.parent.name == "main"]
        if found:
            return main or found
    if not directory.is_dir():
        raise UserError(f"no such file or directory: {directory}")
    folders = sorted(directory.rglob(f"{split}/**/*.json"))
    if not folders:
        raise UserError(f"{directory} has no file *{split}*.jsonl, *{split}*.parquet or *{split}*.json")
    return folders


def problems_of(file: Path) -> Iterator[tuple[int, DataRow]]:
    """Yield the problems of a file with their row numbers. Raises UserError if the file cannot be read."""
    try:
        found = pq.read_table(file).to_pylist() if file.suffix == ".parquet" else _json(file)
    except (pa.ArrowException, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    for index, problem in enumerate(found):
        if not isinstance(problem, dict):
            raise UserError(f"{file}, row {index}: a problem is an object with named fields, not {problem!r}")
        yield index, problem


def _json(file: Path) -> list[object]:
    with pa.input_stream(str(file)) as source:  # decompresses
        text = source.read().decode("utf-8-sig")
    if ".jsonl" in file.suffixes:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    found = json.loads(text)
    return found if isinstance(found, list) else [found]
