"""The groups that continue in the next step, as a file of a checkpoint: a row for each sample.

Prompts are not in the file: they are read again from the data, by their row.
"""

import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.batch import Generation, Group, Prompt, Prompts, StopReason, Turn, float32, int32
from megarl.data.parquet import read_own
from megarl.platform.errors import UserError
from megarl.platform.small_files import Damage

IN_FLIGHT_FILE = "carried.parquet"
CONTENT = "unfinished samples of a run"
TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("reward", pa.float64()),
        ("num_observed", pa.int32()),
        ("observation", pa.string()),
    ]
)
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
        ("turns", pa.list_(TURN)),
        ("stop_reason", pa.string()),
        ("fault", pa.string()),
    ]
)

NUMBERS = {"token_ids": int32, "log_probs": float32, "weight_versions": int32}


def to_bytes(groups: Sequence[Group]) -> bytes:
    """Return the content of the file."""
    rows = [
        {
            "group": number,
            "row": group.prompt.index,
            "num_prompt_tokens": len(group.prompt.token_ids),
            "begun": group.started,
            **{name: getattr(sample, name) for name in SCHEMA.names[4:]},
            **{name: _numbers(getattr(sample, name)) for name in NUMBERS},
            "turns": [asdict(turn) for turn in sample.turns],
        }
        for number, group in enumerate(groups)
        for sample in group.samples
    ]
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in SCHEMA]
    file = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), file, compression="zstd", write_page_checksum=True)
    return file.getvalue()


def read(
    path: Path, prompt_of: Callable[[int], Prompt], opened: Callable[[Prompts], Prompts] | None = None
) -> tuple[Group, ...]:
    """Read the groups in a file.

    Args:
        path: the file.
        prompt_of: returns the prompt of a row of the data set. IndexError if there is no such row.
        opened: makes of these prompts those that the policy reads; None: they are the same.

    Raises:
        Damage: the file is missing or damaged.
        UserError: the data set has other prompts than when the file was written.
    """
    table = read_own(path, CONTENT)
    if not table.schema.equals(SCHEMA):
        raise Damage(path, f"cannot be read as {CONTENT}: its columns are {table.column_names}")
    groups = dict[int, list[dict[str, Any]]]()
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    prompts = []
    for first, *_ in groups.values():
        try:
            prompts.append(prompt_of(first["row"]))
        except IndexError:
            raise _other_data(path, first["row"]) from None
    asked = opened(Prompts(prompts=prompts)).prompts if opened else prompts
    return tuple(_group(path, rows, prompt) for rows, prompt in zip(groups.values(), asked, strict=True))


def _group(path: Path, rows: list[dict[str, Any]], prompt: Prompt) -> Group:
    first = rows[0]
    if len(prompt.token_ids) != first["num_prompt_tokens"]:
        raise _other_data(path, first["row"])
    return Group(prompt=prompt, samples=tuple(map(_sample, rows)), started=first["begun"])


def _sample(row: dict[str, Any]) -> Generation:
    numbers = {name: row[name] if row[name] is None else of(row[name]) for name, of in NUMBERS.items()}
    sample = Generation(prompt=0, **{name: row[name] for name in SCHEMA.names[4:]} | numbers)
    turns = tuple(Turn(**turn) for turn in row["turns"])
    return replace(sample, turns=turns, stop_reason=sample.stop_reason and StopReason(sample.stop_reason))


def _numbers(column: "array[Any] | None") -> Any:
    return None if column is None else np.asarray(column)


def _other_data(path: Path, row: int) -> UserError:
    return UserError(
        f"{path} has unfinished responses to row {row} of data.train_files, which has another prompt now: give the "
        "files of the run, or resume with actor_rollout_ref.rollout.partial.enable=false, which drops these responses"
    )
