"""The problems of published data sets: files of a directory, one file, or a data set of the Hugging Face hub."""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = {"train": "train", "val": "test"}  # ours, and what the data sets call it
KINDS = ("jsonl", "parquet", "json")

DataRow = dict[str, Any]


def add_source_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare where the problems come from and how many of them are taken."""
    parser.add_argument(
        "--from",
        dest="source",
        default=default,
        help="directory with files *train*.jsonl and *test*.jsonl (or .parquet, .json, or folders of such names with "
        "one problem per .json), one such file, which then makes the training problems only, or a data set id of the "
        "hub",
    )
    parser.add_argument("--train", type=int, default=None, help="training problems at most")
    parser.add_argument("--val", type=int, default=None, help="validation problems at most")


def add_extraction_argument(parser: argparse.ArgumentParser) -> None:
    """Declare which number of a response is its answer."""
    parser.add_argument(
        "--extraction",
        choices=("strict", "flexible"),
        default="strict",
        help="which number of a response counts: the one after '####', or the last",
    )


def rows_of(
    arguments: argparse.Namespace, make_row: Callable[[DataRow, str, str, int], DataRow]
) -> dict[str, list[DataRow]]:
    """The rows of `train` and `val`, each `make_row(problem, place, split, index)`.

    Raises ValueError where files are missing or cannot be read.
    """
    place = Path(arguments.source)
    if not place.exists():
        place = _download(arguments.source)
    rows = {}
    for split, name in {"train": ""}.items() if place.is_file() else SPLITS.items():
        files = [place] if place.is_file() else _files_of(place, name)
        problems = islice(((file, i, row) for file in files for i, row in problems_of(file)), getattr(arguments, split))
        rows[split] = [
            make_row(problem, f"{file}, row {i}", split, index) for index, (file, i, problem) in enumerate(problems)
        ]
    return rows


def _files_of(directory: Path, split: str) -> list[Path]:
    for kind in KINDS:
        found = sorted(directory.rglob(f"*{split}*.{kind}"))
        # the hub's copy of GSM8K holds a second wording of the same problems beside `main`
        main = [path for path in found if path.parent.name == "main"]
        if found:
            return main or found
    folders = sorted(directory.rglob(f"{split}/**/*.json"))
    if not folders:
        raise ValueError(f"{directory} has no file *{split}*.jsonl, *{split}*.parquet or *{split}*.json")
    return folders


def problems_of(file: Path) -> Iterator[tuple[int, DataRow]]:
    """The problems of a file with their row numbers. Raises ValueError where it cannot be read."""
    try:
        found = pq.read_table(file).to_pylist() if file.suffix == ".parquet" else _json(file)
    except (pa.ArrowException, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    for index, problem in enumerate(found):
        if not isinstance(problem, dict):
            raise ValueError(f"{file}, row {index}: a problem is an object with named fields, not {problem!r}")
        yield index, problem


def _json(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    found = json.loads(text)
    return found if isinstance(found, list) else [found]


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = [f"*.{kind}" for kind in KINDS]
        return Path(snapshot_download(source, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--from {source}: there is no such directory, and the hub does not give such a data set ({error}); "
            "where there is no network, download train.jsonl and test.jsonl elsewhere and name their directory"
        ) from error
