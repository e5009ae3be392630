"""The groups that continue in the next step, as a file of a checkpoint: a row for each sample.

Prompts are not in the file: they are read again from the data, by their row.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.batch import Generation, Group, Prompt
from megarl.data.parquet import read_own
from megarl.platform.small_files import Damage

CARRIED_FILE = "carried.parquet"
CONTENT = "unfinished samples of a run"
SCHEMA = pa.schema(
    [
        ("group", pa.int64()),  # the same for all samples of a prompt, which are neighbours
        ("row", pa.int64()),  # of the prompt in the data set
        ("num_prompt_tokens", pa.int64()),
        ("begun", pa.int64()),
        ("sample", pa.int64()),
        ("complete", pa.bool_()),
        ("truncated", pa.bool_()),
        ("token_ids", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float32())),
        ("weight_versions", pa.list_(pa.int32())),
    ]
)


def to_bytes(groups: Sequence[Group]) -> bytes:
    """Return the content of the file."""
    rows = [
        {
            "group": number,
            "row": group.prompt.index,
            "num_prompt_tokens": len(group.prompt.token_ids),
            "begun": group.begun,
            **{name: getattr(sample, name) for name in SCHEMA.names[4:]},
        }
        for number, group in enumerate(groups)
        for sample in group.samples
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd", write_page_checksum=True)
    return file.getvalue()


def read(path: Path, prompt_of: Callable[[int], Prompt]) -> tuple[Group, ...]:
    """Read the groups in a file. `prompt_of` returns the prompt of a row of the data set.

    Raises:
        Damage: the file is missing or damaged.
        ValueError: the data set has other prompts than when the file was written.
    """
    table = read_own(path, CONTENT)
    if not table.schema.equals(SCHEMA):
        raise Damage(path, f"cannot be read as {CONTENT}: its columns are {table.column_names}")
    groups = dict[int, list[dict[str, Any]]]()
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    return tuple(_group(path, rows, prompt_of) for rows in groups.values())


def _group(path: Path, rows: list[dict[str, Any]], prompt_of: Callable[[int], Prompt]) -> Group:
    first = rows[0]
    try:
        prompt = prompt_of(first["row"])
    except IndexError:
        raise _other_data(path, first["row"]) from None
    if len(prompt.token_ids) != first["num_prompt_tokens"]:
        raise _other_data(path, first["row"])
    samples = (Generation(prompt=0, **{name: row[name] for name in SCHEMA.names[4:]}) for row in rows)
    return Group(prompt=prompt, samples=tuple(samples), begun=first["begun"])


def _other_data(path: Path, row: int) -> ValueError:
    return ValueError(
        f"{path} has unfinished responses to row {row} of data.train_files, which has another prompt now: give the "
        "files of the run, or resume with actor_rollout_ref.rollout.partial.enable=false, which drops these responses"
    )
