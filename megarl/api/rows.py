"""The rows of a program as the parquet files of a run."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megarl.commands.prepare import read_words
from megarl.data.parquet import write_rows
from megarl.platform.files import write_whole

ROWS_FILE = "rows.jsonl"


def data_files(data: object, directory: Path, *, prompt: str, answer: str | None, plain: bool) -> dict[str, Path]:
    """Return the files `train` and, if there are rows enough, `val`.

    Args:
        data: a file that `megarl prepare own` reads; or rows: mappings, a `datasets.Dataset` or a pandas DataFrame. A
            parquet file is used as it is if no `answer` is named.
        directory: where files are written.
        prompt: the column of the prompts.
        answer: the column of the ground truths, if there is one.
        plain: prompts are texts, not messages, because the model has no chat template.

    Raises:
        UserError: files or columns are missing, or a row is invalid.
    """
    if isinstance(data, str | Path):
        file = Path(data).absolute()
        if file.suffix == ".parquet" and answer is None:
            return {"train": file}
    else:
        file = directory / ROWS_FILE
        write_whole(file, "".join(f"{json.dumps(dict(row))}\n" for row in _rows(data)).encode())
    words = ["own", str(file), "--out", str(directory), "--prompt", prompt]
    words += ["--answer", answer] if answer else []
    arguments, task = read_words([*words, *(["--plain"] if plain else [])])
    files = {}
    for split, rows in task.build(arguments).items():
        files[split] = directory / f"{split}.parquet"
        write_rows(files[split], rows)
    return files


def count_rows(file: Path) -> int:
    """Return the number of rows of a parquet file."""
    return int(pq.read_metadata(file).num_rows)


def _rows(data: Any) -> Iterable[Mapping[str, Any]]:
    is_frame = hasattr(data, "to_dict") and hasattr(data, "columns")
    rows: Iterable[Mapping[str, Any]] = data.to_dict("records") if is_frame else data
    return rows
