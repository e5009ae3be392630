"""The columns of a file of samples: one table for writing files and for checking them.

A new field of a sample needs a row here, and its values in `store.py`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from megarl.platform.small_files import Damage


@dataclass(frozen=True)
class Column:
    """The type and the constraints of a column."""

    type: pa.DataType
    null: Literal["never", "in all rows or none", "in any row", "if the reward failed"] = "never"
    per_token: bool = False  # a list as long as the response
    minimum: int | None = None
    is_json: bool = False


TOKENS = pa.list_(pa.int32())
PROMPT_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "index": Column(pa.int64()),
        "prompt_id": Column(pa.string(), null="in any row"),
        "data_source": Column(pa.string()),
        "prompt": Column(pa.string()),
        "prompt_ids": Column(TOKENS, minimum=0),
        "ground_truth": Column(pa.string(), is_json=True),
    }
)
"""These columns are equal in all rows of a group."""
SAMPLE_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "step": Column(pa.int64(), minimum=0),
        "group": Column(pa.int64(), minimum=0),  # the same for all samples of a prompt, which are neighbours
        "response": Column(pa.string()),
        "response_ids": Column(TOKENS, minimum=0),
        "rollout_log_probs": Column(pa.list_(pa.float32()), null="in all rows or none", per_token=True),
        "truncated": Column(pa.bool_()),
        # of each token: finished steps at the sync of the weights that drew it
        "weight_versions": Column(TOKENS, null="in all rows or none", per_token=True, minimum=0),
        # of episodes: which tokens the environment said, the reward of each turn on its last token, and the end
        "observed": Column(pa.list_(pa.bool_()), null="in all rows or none", per_token=True),
        "turn_rewards": Column(pa.list_(pa.float32()), null="in all rows or none", per_token=True),
        "num_turns": Column(pa.int64(), null="in all rows or none", minimum=1),
        "stop_reason": Column(pa.string(), null="in all rows or none"),
        "fault": Column(pa.string(), null="in any row"),  # what was wrong with the environment
        "score": Column(pa.float32(), null="if the reward failed"),
        "accuracy": Column(pa.float32(), null="if the reward failed"),
        "failure": Column(pa.string(), null="in any row"),  # why there is no score
        "answer": Column(pa.string(), null="in any row"),  # the extracted answer, which counts in a majority vote
        "baseline": Column(pa.float32(), null="in all rows or none"),  # the reward of the greedy response to the prompt
    }
)
COLUMNS = {**PROMPT_COLUMNS, **SAMPLE_COLUMNS}
EPISODE_COLUMNS = ("observed", "turn_rewards", "num_turns", "stop_reason")
"""All of these are null, or none."""


def arrow_schema(columns: Mapping[str, Column]) -> pa.Schema:
    """Return the Arrow schema of these columns."""
    return pa.schema([(name, column.type) for name, column in columns.items()])


def check(table: pa.Table, *, file: object) -> None:
    """Check every value of a table that was read from `file`.

    Raises:
        Damage: names the first column, and the first row counted from 0, that differs from `COLUMNS`.
    """
    if fault := next(_faults(table), None):
        raise Damage(file, f"cannot be read as samples of a run: {fault}")


def _faults(table: pa.Table) -> Iterator[str]:
    for name, column in COLUMNS.items():
        if (count := table.column_names.count(name)) != 1:
            yield f"it has {count or 'no'} column{'s' if count else ''} {name!r}: give a dump of a run"
        elif not _same(found := table.schema.field(name).type, column.type):
            yield f"column {name} has the type {found} instead of {column.type}"
    if not table.num_rows:
        yield "it has no samples: give a dump of a run"
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        yield str(error)
    lengths = pc.list_value_length(table["response_ids"])
    for name, column in COLUMNS.items():
        yield from _faults_of(name, column, table[name], lengths)
        if column.null == "if the reward failed":
            odd = pc.equal(pc.is_null(table[name]), pc.is_null(table["failure"]))
            if _any(odd):
                yield f"row {_first(odd)}, column {name}: it has neither a number nor a failure, or both"
    for name in EPISODE_COLUMNS:
        if table[name].null_count != table[EPISODE_COLUMNS[0]].null_count:
            yield f"column {name} and column {EPISODE_COLUMNS[0]}: one is null, and the other is not"
    yield from _faults_of_groups(table)


def _same(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether two types are equal. Other programs name the items of a list differently."""
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return bool(found.value_type == expected.value_type)
    return bool(found == expected)


def _faults_of(name: str, column: Column, values: Any, lengths: Any) -> Iterator[str]:
    """Yield the faults of one column. `lengths` are the `[rows]` lengths of the responses."""
    nulls = pc.is_null(values)
    if column.null == "never" and values.null_count:
        yield f"row {_first(nulls)}, column {name}: it is null"
    if column.null == "in all rows or none" and 0 < values.null_count < len(values):
        yield f"row {_first(nulls)}, column {name}: it is null, but others are not"
    present = pc.is_valid(values)
    if pa.types.is_list(column.type):
        items, parents = pc.list_flatten(values), pc.list_parent_indices(values)
        if items.null_count:
            yield f"row {_parent(parents, pc.is_null(items))}, column {name}: a number is null"
        if column.minimum is not None and _any(low := pc.less(items, column.minimum)):
            yield f"row {_parent(parents, low)}, column {name}: a number is less than {column.minimum}"
        if column.per_token and _any(other := pc.and_(present, pc.not_equal(pc.list_value_length(values), lengths))):
            row = _first(other)
            yield f"row {row}, column {name}: {len(values[row])} numbers for a response of {lengths[row]} tokens"
    elif column.minimum is not None and _any(low := pc.less(values, column.minimum)):
        yield f"row {_first(low)}, column {name}: {values[_first(low)]} is less than {column.minimum}"
    if column.is_json:
        for row, text in enumerate(values.to_pylist()):
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                yield f"row {row}, column {name}: it is not JSON ({type(error).__name__}: {str(error)[:80]})"


def _faults_of_groups(table: pa.Table) -> Iterator[str]:
    """Yield faults unless the samples of a group are neighbours with the same prompt, all of the same step."""
    groups, steps, closed = table["group"].to_pylist(), table["step"].to_pylist(), set[int]()
    for row in range(1, len(groups)):
        if groups[row] != groups[row - 1]:
            closed.add(groups[row - 1])
            if groups[row] in closed:
                yield f"row {row}, column group: other samples of group {groups[row]} are not next to it"
        else:
            for name in PROMPT_COLUMNS:
                if not table[name][row].equals(table[name][row - 1]):
                    yield f"row {row}, column {name}: it differs from row {row - 1} of the same group"
        if steps[row] != steps[0]:
            yield f"row {row}, column step: {steps[row]}, but row 0 is of step {steps[0]}"


def _any(flags: Any) -> bool:
    return bool(pc.any(flags).as_py())


def _first(flags: Any) -> int:
    """Return the first row whose flag is set."""
    row: int = pc.index(flags, True).as_py()
    return row


def _parent(parents: Any, flags: Any) -> int:
    """Return the first row with an item whose flag is set."""
    row: int = parents[_first(flags)].as_py()
    return row
