"""Reads files of samples: every rank reads the numbers and the prompts of all rows, and all columns of its own rows.

A row group is what a rank reads at once. So a rank reads little more than its rows, unless another program has written
the file as one group.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from megarl.batch import Prompt, Scored, int32
from megarl.columns import int64
from megarl.data.parquet import OwnFile
from megarl.distributed.exchange import all_reduce, on_each_rank, run_of
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Index, Sharded, Shares
from megarl.platform.small_files import Damage, naming
from megarl.samples.arrays import array_from
from megarl.samples.schema import COLUMNS, PROMPT_COLUMNS, check_columns, check_groups, check_values, damage
from megarl.samples.store import PART, PARTS, PLACE

CONTENT = "samples of a run"
OF_ALL = ("step", "group", "truncated", "baseline")
"""The columns of all samples that every rank reads, besides those of prompts."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the samples in a file, or in all files of a directory, by columns. Raises Damage."""
    files = _Files.of(path)
    rows = files.rows(files.everything, in_order=files.order())
    check_values(rows, file=path)
    check_groups(rows, file=path)
    return [*rows.to_pylist()]


def step_of(path: Path) -> int:
    """Return the step whose samples a file has. Raises Damage."""
    return int(_Files.of(path).all_of("step")["step"][0].as_py())


def read_samples(path: Path, shares: Shares) -> tuple[Sharded[Scored], Tensor | None]:
    """Read the samples and the baselines `[B]` that were written to `path`. Each share has an equal run of the rows.

    Collective.

    Raises:
        Damage: the file does not exist, or differs from `schema.py`. Names the column. Every rank raises it.
    """
    found = on_each_rank(lambda: _ReadRows.read(path, shares))
    read = found.rows
    nulls = _sum(int64([*(read[name].null_count for name in COLUMNS), len(read)]), shares)
    absent = on_each_rank(lambda: _absent(path, nulls))
    share = on_each_rank(lambda: _record(path, found, absent))
    mine = (found.owners == shares.here).nonzero()[:, 0]
    share = share.select(torch.arange(len(mine)))
    numbers = torch.zeros(len(found.owners), 2, dtype=torch.int64)
    numbers[mine] = torch.stack([share.num_tokens, share.num_learnt()], dim=-1)
    num_tokens, num_learnt = _sum(numbers, shares).unbind(-1)
    index = Index(
        prompts=found.prompts,
        runs=Runs.of(found.groups, found.owners),
        num_tokens=num_tokens.contiguous(),
        num_learnt=num_learnt.contiguous(),
        truncated=found.truncated,
    )
    return Sharded(index=index, share=share, shares=shares), found.baselines


def _sum(numbers: Tensor, shares: Shares) -> Tensor:
    """Return the sums of the numbers, int64, of all shares. Collective."""
    if shares.number == 1:
        return numbers
    found = numbers if shares.reports else torch.zeros_like(numbers)
    all_reduce(found)
    return found


@dataclass(frozen=True)
class _Files:
    """The files of a step: one, or the parts of a directory."""

    path: Path
    files: Sequence[OwnFile]
    is_parted: bool

    @classmethod
    def of(cls, path: Path) -> "_Files":
        """Find the files at `path`, and check their columns. Raises Damage."""
        files = [OwnFile.find(file, CONTENT) for file in (_parts(path) if path.is_dir() else [path])]
        found = cls(path=path, files=files, is_parted=path.is_dir())
        schema = files[0].schema
        if found.is_parted and not (PLACE in schema.names and all(file.schema.equals(schema) for file in files)):
            detail = f"its files have no column {PLACE!r}, or different columns"
            raise Damage(path, f"cannot be read as {CONTENT}: {detail}")
        check_columns(schema, file=path)
        if not sum(file.num_rows for file in files):
            raise damage(path, "it has no samples")
        return found

    @property
    def everything(self) -> range:
        """All rows."""
        return range(sum(file.num_rows for file in self.files))

    def rows(self, rows: range, columns: Sequence[str] = tuple(COLUMNS), *, in_order: Tensor | None = None) -> pa.Table:
        """Return columns of neighbouring rows. Those of several parts have the order `in_order`, their places."""
        tables = []
        first = 0
        for file in self.files:
            tables.append(file.rows(range(rows.start - first, rows.stop - first), columns))
            first += file.num_rows
        table = pa.concat_tables(tables)
        return table.take(in_order.numpy()) if in_order is not None and self.is_parted else table

    def all_of(self, *columns: str) -> pa.Table:
        """Return columns of all rows."""
        return self.rows(self.everything, columns)

    def order(self) -> Tensor:
        """Return the rows in the order of the samples: int64 `[B]`."""
        if not self.is_parted:
            return torch.arange(len(self.everything))
        return torch.from_numpy(self.all_of(PLACE)[PLACE].to_numpy()).argsort()

    def prompts(self, rows: Tensor) -> list[Prompt]:
        """Return the prompts of the given rows, int64, in their order."""
        wanted = rows.sort().values.numpy()
        found = list[Prompt]()
        first = 0
        for file in self.files:
            here = wanted[slice(*wanted.searchsorted([first, first + file.num_rows]))] - first
            table = file.take(here, tuple(PROMPT_COLUMNS))
            with naming(self.path):  # JSON that cannot be read
                found += map(_prompt, table.to_pylist())
            first += file.num_rows
        return [found[place] for place in rows.argsort().argsort().tolist()]


@dataclass(frozen=True)
class _ReadRows:
    """The rows of this rank's share, and the columns of all `B` samples that every rank has."""

    rows: pa.Table  # in the order of the samples; the first row of a file if the share has none
    places: Tensor  # int64: of these rows among all samples
    owners: Tensor  # [B] int64
    groups: Tensor  # [B] int64
    prompts: Sequence[Prompt]
    truncated: Tensor  # [B] bool
    baselines: Tensor | None  # [B] float32

    @classmethod
    def read(cls, path: Path, shares: Shares) -> "_ReadRows":
        """Read what this rank needs. Raises Damage."""
        files = _Files.of(path)
        order = files.order()
        total = len(order)
        runs = [run_of(total, rank=share, size=shares.number) for share in range(shares.number)]
        owners = torch.arange(shares.number).repeat_interleave(int64([*map(len, runs)]))[order]
        mine = (owners == shares.here).nonzero()[:, 0]
        own = runs[shares.here] or range(1)
        places = mine if runs[shares.here] else (order == 0).nonzero()[:, 0]
        rows = files.rows(own, in_order=order[places] - own.start)
        check_values(rows, file=path)
        table = files.rows(files.everything, OF_ALL, in_order=order)
        check_groups(table, file=path)
        _, groups, sizes = _tensor(table["group"]).unique_consecutive(return_inverse=True, return_counts=True)
        return cls(
            rows=rows,
            places=places,
            owners=owners,
            groups=groups,
            prompts=files.prompts(order[sizes.cumsum(0) - sizes]),
            truncated=torch.tensor(table["truncated"].to_pylist()),
            baselines=None if table["baseline"].null_count else _tensor(table["baseline"]),
        )


def _absent(path: Path, nulls: Tensor) -> frozenset[str]:
    """Return the columns that are null in all rows. Raises Damage.

    `nulls` int64 are the rows in which each column is null, and the number of rows.
    """
    *counts, total = nulls.tolist()
    found = dict(zip(COLUMNS, counts, strict=True))
    for name, count in found.items():
        if COLUMNS[name].null == "in all rows or none" and 0 < count < total:
            raise damage(path, f"column {name}: it is null in {count} of {total} rows")
    return frozenset(name for name, count in found.items() if count == total)


def _record(path: Path, part: _ReadRows, absent: Collection[str]) -> Scored:
    """Return the record of a part, without the columns that are `absent`. Raises Damage."""
    table = part.rows

    def tokens(name: str, dtype: torch.dtype) -> Tensor | None:
        return None if name in absent else _column(table[name], dtype)

    def listed(name: str) -> list[Any] | None:
        return None if name in absent else table[name].to_pylist()

    observed = tokens("observed", torch.bool)
    responses = _column(table["response_ids"], torch.int32)
    scored = Scored(
        prompts=part.prompts,
        groups=part.groups[part.places],
        num_tokens=torch.from_numpy(pc.list_value_length(table["response_ids"]).to_numpy().astype("int64")),
        responses=responses,
        mask=torch.ones_like(responses, dtype=torch.bool) if observed is None else ~observed,
        rollout_log_probs=tokens("rollout_log_probs", torch.float32),
        routes=None,
        truncated=part.truncated[part.places],
        weight_versions=tokens("weight_versions", torch.int32),
        turn_rewards=tokens("turn_rewards", torch.float32),
        num_turns=None if "num_turns" in absent else _tensor(table["num_turns"]),
        stop_reasons=listed("stop_reason"),
        faults=None if observed is None else table["fault"].to_pylist(),
        texts=table["response"].to_pylist(),
        scores=_tensor(table["score"]),
        accuracies=_tensor(table["accuracy"]),
        answers=listed("answer"),
        failures=listed("failure"),
    )
    if "routes" in absent:
        return scored
    with naming(path):
        return replace(scored, routes=_routes(table["routes"], scored.num_places()))


def _parts(directory: Path) -> list[Path]:
    """Return the parts in a directory. Raises Damage if some are missing."""
    parts = sorted(directory.glob(PARTS))
    number = int(parts[0].stem.rpartition("-")[2]) if parts else 1
    expected = [directory / PART.format(place, number) for place in range(number)]
    for part in sorted({*parts} ^ {*expected}):
        fault = "it has no" if part in expected else "of another number of replicas is"
        raise Damage(directory, f"cannot be read as {CONTENT}: {fault} {part.name}")
    return parts


def _routes(cells: pa.ChunkedArray, counts: Tensor) -> Tensor:
    """Turn the arrays of samples, of `counts` rows each, back into rows end to end.

    Raises:
        ValueError: an array is damaged, or has another shape.
    """
    try:
        arrays = [array_from(cell) for cell in cells.to_pylist()]
        routes = torch.cat(arrays)
    except (ValueError, EOFError, RuntimeError) as error:
        raise ValueError(f"column routes: {error}") from error
    if [len(array) for array in arrays] != counts.tolist():
        raise ValueError("column routes: its arrays are not as long as the prompts and responses")
    return routes


def _tensor(numbers: pa.ChunkedArray) -> Tensor:
    return torch.from_numpy(numbers.to_numpy().copy())


def _column(lists: pa.ChunkedArray, dtype: torch.dtype) -> Tensor:
    """Turn lists back into a column `[N]`."""
    values = lists.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(values.copy()).to(dtype)


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(
        index=row["index"],
        prompt_id=row["prompt_id"],
        token_ids=int32(row["prompt_ids"]),
        text=row["prompt"],
        data_source=row["data_source"],
        ground_truth=json.loads(row["ground_truth"]),
        extra_info={},
    )
