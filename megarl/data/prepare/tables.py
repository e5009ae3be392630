"""Records of a user's own files, whatever their format; a record knows its place for messages."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc

from megarl.data.prepare.hub_data import HubData
from megarl.data.rows import Rows
from megarl.data.table import DataRow, WantedColumns
from megarl.platform.errors import UserError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT_TABLE = "the text must be UTF-8, with as many cells in each row as in the first, which names the columns"
ARROW = (".arrow", ".feather")
CACHED = "cache-"
"""Begins the names of files that `Dataset.map` leaves beside those of a saved data set."""
MOST_BYTES = 2**31 - 1
"""Bytes of a block, an `int32` of pyarrow. No row may be longer."""


class Record(NamedTuple):
    """A row, and its place."""

    place: str
    values: DataRow


def records_of(
    files: Sequence[str], columns: Sequence[str], remedies: Mapping[str, str], *, split: str
) -> Iterator[Record]:
    """Yield the rows of files and directories in order, with only the columns named.

    Values of a .csv or .tsv file are texts. In a directory that `DatasetDict.save_to_disk` wrote, the split `train`
    counts, and in a data set of the hub `split`.

    Raises:
        UserError: a file is missing, cannot be read, is empty or lacks a column.
    """
    wanted = WantedColumns(required=tuple(columns), remedies=remedies)
    for file in chain.from_iterable(_files_of(name, split) for name in files):
        suffix = Path(file).suffix.lower()
        if suffix not in (*SEPARATORS, *ARROW):
            rows = Rows(file, columns=columns, remedies=remedies)
            yield from (Record(rows.place(number), row) for number, row in enumerate(rows))
            continue
        try:
            table = _read_texts(file, SEPARATORS[suffix]) if suffix in SEPARATORS else _read_arrow(file)
        except FileNotFoundError as error:
            raise UserError(f"no such file: {file}") from error
        except (pa.ArrowException, OSError) as error:
            wanted_text = f"; {TEXT_TABLE}" if suffix in SEPARATORS else ""
            raise UserError(f"{file} cannot be read as {suffix}: {error}{wanted_text}") from error
        table = table.select(wanted.find(file, table.column_names))
        if not len(table):
            raise UserError(f"{file} is empty: it has columns but no row")
        found = chain.from_iterable(batch.to_pylist() for batch in table.to_batches())
        yield from (Record(f"{file}, row {number}", row) for number, row in enumerate(found))


def _files_of(name: str, split: str) -> list[str]:
    """Return the files of a data set of the hub, those of a saved data set if `name` is a directory, else `name`."""
    data = HubData.named(name)
    if data:
        return list(map(str, data.files(split)))
    directory = Path(name)
    if not directory.is_dir():
        return [name]
    train = directory / "train"
    saved = (train if train.is_dir() else directory).glob("*.arrow")
    found = sorted(path for path in saved if not path.name.startswith(CACHED))
    if found:
        return list(map(str, found))
    for ending in ("parquet", "jsonl", "json", "csv"):
        found = sorted(directory.glob(f"*.{ending}"))
        if found:
            return list(map(str, found))
    raise UserError(f"{name} has no .arrow file of a saved data set, and no .parquet, .jsonl, .json or .csv file")


def _read_texts(file: str, separator: str) -> pa.Table:
    """Read a table whose values are all texts: a column of answers such as 007 is no column of numbers."""
    block = min(Path(file).stat().st_size + 1, MOST_BYTES)
    how = {
        "read_options": pyarrow.csv.ReadOptions(block_size=block, use_threads=False),  # so that errors name the row
        "parse_options": pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
    }
    with pyarrow.csv.open_csv(file, **how) as head:
        names = head.schema.names
    texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    return pyarrow.csv.read_csv(file, convert_options=texts, **how)


def _read_arrow(file: str) -> pa.Table:
    """Read an Arrow file in either of its formats: Hugging Face writes the one for streams."""
    with pa.memory_map(file) as source:
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pyarrow.ipc.open_file(source).read_all()
