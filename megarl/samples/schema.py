"""The columns of a file of samples: one table for writing files and for checking them.

The pages of a file have checksums. So a file is checked only for what readers rely on and another program may have
changed. A new field of a sample needs a row here, and its values in `store.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from megarl.platform.small_files import Damage


@dataclass(frozen=True)
class Column:
    """The type and the constraints of a column."""

    type: pa.DataType
    null: Literal["never", "in all rows or none", "in any row", "if the reward failed"] = "never"
    per_token: bool = False  # a list as long as the response


TOKENS = pa.list_(pa.int32())
PROMPT_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "index": Column(pa.int64()),
        "prompt_id": Column(pa.string(), null="in any row"),
        "data_source": Column(pa.string()),
        "prompt": Column(pa.string()),
        "prompt_ids": Column(TOKENS),
        "ground_truth": Column(pa.string()),
    }
)
"""These columns are equal in all rows of a group."""
SAMPLE_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "step": Column(pa.int64()),
        "group": Column(pa.int64()),  # the same for all samples of a prompt, which are neighbours
        "response": Column(pa.string()),
        "response_ids": Column(TOKENS),
        "rollout_log_probs": Column(pa.list_(pa.float32()), null="in all rows or none", per_token=True),
        # the experts that the engine chose: [tokens of prompt and response - 1, layers, experts of a token], as NPY
        "routes": Column(pa.binary(), null="in all rows or none"),
        "truncated": Column(pa.bool_()),
        # of each token: finished steps at the sync of the weights that drew it
        "weight_versions": Column(TOKENS, null="in all rows or none", per_token=True),
        # of episodes: which tokens the environment said, the reward of each turn on its last token, and the end
        "observed": Column(pa.list_(pa.bool_()), null="in all rows or none", per_token=True),
        "turn_rewards": Column(pa.list_(pa.float32()), null="in all rows or none", per_token=True),
        "num_turns": Column(pa.int64(), null="in all rows or none"),
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


def damage(file: object, fault: str) -> Damage:
    """Return the error about a file of samples."""
    return Damage(file, f"cannot be read as samples of a run: {fault}; give a file as a run wrote it")


def check_columns(schema: pa.Schema, *, file: object) -> None:
    """Check the columns of a file of samples. Raises Damage; it names the first that differs from `COLUMNS`."""
    for name, column in COLUMNS.items():
        count = schema.names.count(name)
        if count != 1:
            raise damage(file, f"it has {count or 'no'} column{'s' if count else ''} {name!r}")
        if not _same(schema.field(name).type, column.type):
            raise damage(file, f"column {name} has the type {schema.field(name).type} instead of {column.type}")


def check_groups(table: pa.Table, *, file: object) -> None:
    """Check groups and steps of all samples of a file, in their order. Raises Damage."""
    _check_nulls(table, file)
    if len(pc.unique(table["group"])) != len(pc.run_end_encode(table["group"].combine_chunks()).values):
        raise damage(file, "column group: the samples of a group are not next to each other")
    if len(pc.unique(table["step"])) > 1:
        raise damage(file, "column step: the samples are of several steps")


def check_values(table: pa.Table, *, file: object) -> None:
    """Check what readers rely on in the values of rows. Raises Damage, which names the column."""
    _check_nulls(table, file)
    fault = next(_faults_of_values(table), None)
    if fault:
        raise damage(file, fault)


def _check_nulls(table: pa.Table, file: object) -> None:
    for name in table.column_names:
        num_null, null = table[name].null_count, COLUMNS[name].null
        if (null == "never" and num_null) or (null == "in all rows or none" and 0 < num_null < len(table)):
            raise damage(file, f"column {name}: it is null in {num_null} of {len(table)} rows")


def _faults_of_values(table: pa.Table) -> Iterator[str]:
    lengths = pc.list_value_length(table["response_ids"])
    failed = table["failure"].is_valid()
    for name, column in COLUMNS.items():
        values = table[name]
        num_null = table[name].null_count
        if column.null == "if the reward failed" and not values.is_null().equals(failed):
            yield f"column {name}: a row has neither a number nor a failure, or both"
        if name in EPISODE_COLUMNS and num_null != table[EPISODE_COLUMNS[0]].null_count:
            yield f"column {name} and column {EPISODE_COLUMNS[0]}: one is null, and the other is not"
        if pa.types.is_list(column.type) and pc.list_flatten(values).null_count:
            yield f"column {name}: a number is null"
        if column.per_token and not num_null and not pc.list_value_length(values).equals(lengths):
            yield f"column {name}: its lists are not as long as the responses"


def _same(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether two types are equal. Other programs name the items of a list differently."""
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return bool(found.value_type == expected.value_type)
    return bool(found == expected)
