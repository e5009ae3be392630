"""The rows of a program as the parquet files of a run."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from megarl.commands.prepare import read_words
from megarl.data.messages import shown
from megarl.data.parquet import write_rows
from megarl.data.prepare.hub_data import HubData
from megarl.data.prepare.tables import records_of
from megarl.data.rows import Rows
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole

ROWS_FILE = "rows.jsonl"
KINDS = "a file, a data set of the hub, mappings, a datasets.Dataset or a DataFrame"


def data_files(
    data: object,
    directory: Path,
    *,
    prompt: str,
    answer: str | None,
    plain: bool,
    keep: Sequence[str] = (),
    data_source: str = "own",
) -> dict[str, str]:
    """Return the files `train` and, if there are rows enough, `val`.

    Args:
        data: a file or a data set of the hub that `megarl prepare own` reads; or rows: mappings, a `datasets.Dataset`
            or a pandas DataFrame. A parquet file is used as it is if no `answer` is named.
        directory: where files are written.
        prompt: the column of the prompts.
        answer: the column of the ground truths, if there is one.
        plain: prompts that are texts stay texts, because the model has no chat template.
        keep: the columns that rewards receive in `extra_info`.
        data_source: chooses a built-in reward, and names the score.

    Raises:
        UserError: files or columns are missing, or a row is invalid.
    """
    if isinstance(data, str | Path):
        file = _place(data)
        if file.endswith(".parquet") and answer is None:
            return {"train": file}
    else:
        file = str(directory / ROWS_FILE)
        columns = {prompt, *keep}
        if answer:
            columns.add(answer)
        write_whole(Path(file), "".join(f"{line}\n" for line in _lines(data, columns)).encode())
    words = ["own", file, "--out", str(directory), "--prompt", prompt, "--data-source", data_source]
    if answer:
        words += ["--answer", answer]
    for name in keep:
        words += ["--keep", name]
    if plain and isinstance(_first(file, prompt), str):
        words.append("--plain")
    arguments, task = read_words(words)
    files = {}
    assert task
    for split, rows in task.build(arguments).items():
        files[split] = str(directory / f"{split}.parquet")
        write_rows(Path(files[split]), rows)
    return files


def count_rows(file: str) -> int:
    """Return the number of rows of a file. Raises UserError if it cannot be read."""
    return len(Rows(file, columns=()))


def as_json(value: Any) -> object:
    """Return a value of numpy, a time or a path as JSON has it, for `json.dumps(default=)`. Raises TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{shown(value)} is neither a text, a number, a list, a mapping nor None")


def _place(data: str | Path) -> str:
    """Return the absolute path of a file; a URI and the id of a data set stay as they are."""
    if isinstance(data, str) and ("://" in data or HubData.named(data)):
        return data
    return str(Path(data).expanduser().absolute())


def _first(file: str, prompt: str) -> object:
    """Return the prompt of the first row."""
    return next(records_of([file], [prompt], {prompt: "prompt= names another"}, split="train")).values[prompt]


def _lines(data: object, columns: Collection[str]) -> Iterator[str]:
    """Yield a line of JSON for each row; values of other columns are left out, but their names stay.

    Raises:
        UserError: these are no rows, or a value has no place in a file.
    """
    for number, row in enumerate(_rows(data)):
        if not isinstance(row, Mapping):
            raise UserError(f"data: row {number} is {shown(row)}, no mapping of columns to values")
        try:
            yield json.dumps({name: row[name] if name in columns else None for name in row}, default=as_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"data: row {number}: {error}") from error


def _rows(data: Any) -> Iterable[object]:
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        objects = data.astype(object)
        rows: Iterable[object] = objects.where(data.notna(), None).to_dict("records")
        return rows
    if isinstance(data, Mapping):
        raise UserError(f"data is a mapping with {', '.join(map(str, data))}, not rows: give {KINDS}, as data[NAME]")
    if not isinstance(data, Iterable):
        raise UserError(f"data is {shown(data)}: give {KINDS}")
    return data
