"""The groups that continue in the next step, as files of a checkpoint: a row for each sample.

Each engine replica has a file with the samples whose tokens it has. Prompts are not in the files: they are read again
from the data, by their row. A rank reads the groups of its share, and ranks exchange a few numbers of each sample.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from megarl.batch import Generation, Group, Prompt, Prompts, StopReason, Turn, float32, int32
from megarl.columns import Integers
from megarl.data.parquet import OwnFile
from megarl.distributed.evenly import deal
from megarl.distributed.exchange import on_each_rank, together
from megarl.distributed.made_prompts import redistribute_prompts
from megarl.distributed.sharded import Shares
from megarl.platform.errors import UserError
from megarl.platform.seeds import seed_of
from megarl.platform.small_files import Damage, naming
from megarl.rollout.table import ROW, GroupRows, SampleTable
from megarl.samples.arrays import array_bytes, array_from

IN_FLIGHT_FILE = "carried-{:05}.parquet"
IN_FLIGHT_FILES = "carried*.parquet"
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
        ("prompt_digest", pa.int64()),
        ("begun", pa.int64()),
        ("sample", pa.int64()),
        ("complete", pa.bool_()),
        ("truncated", pa.bool_()),
        ("token_ids", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float32())),
        ("routes", pa.binary()),
        ("weight_versions", pa.list_(pa.int32())),
        ("turns", pa.list_(TURN)),
        ("stop_reason", pa.string()),
        ("fault", pa.string()),
    ]
)

PromptOf = Callable[[int], Prompt]
"""Returns the prompt of a row of the data set."""
Opened = Callable[[Prompts], Prompts]
"""Makes of the prompts of the data set those that the policy reads."""

OF_PROMPT, OF_SAMPLE = SCHEMA.names[:5], SCHEMA.names[5:]
NUMBERS = {"token_ids": int32, "log_probs": float32, "weight_versions": int32}


@dataclass(frozen=True)
class InFlight:
    """The groups that continue in the next step."""

    groups: tuple[Group, ...] = ()
    shares: Shares = field(default_factory=Shares)  # of the engine replicas

    def files(self) -> dict[str, bytes]:
        """Return the files that this rank adds to a checkpoint, by name."""
        if not self.groups or not self.shares.reports:
            return {}
        return {IN_FLIGHT_FILE.format(self.shares.here): to_bytes(dict(enumerate(self.groups)), self.shares)}

    @classmethod
    def read(
        cls,
        files: Sequence[Path],
        shares: Shares,
        prompt_of: PromptOf,
        opened: Opened | None = None,
    ) -> "InFlight":
        """Read the groups in the files of a checkpoint, which may be of a job with other replicas. Collective.

        Arguments and errors as `read`.
        """
        return cls(tuple(read(files, shares, prompt_of, opened).values()), shares)


NOTHING = InFlight()


def to_bytes(groups: Mapping[int, Group], shares: Shares) -> bytes:
    """Return the content of a file with the samples of groups, by number, whose tokens this rank has.

    The first share has samples without tokens too. The samples of a group are a row group, so ranks can read it alone.
    """
    rows = (
        _row(number, group, sample)
        for number, group in groups.items()
        for sample in group.samples
        if isinstance(sample, Generation) and (sample.num_tokens or shares.here == 0)
    )
    file = io.BytesIO()
    with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for _, of_group in groupby(rows, itemgetter("group")):
            cells = [*of_group]
            columns = [pa.array([row[field.name] for row in cells], type=field.type) for field in SCHEMA]
            writer.write_table(pa.table(columns, schema=SCHEMA))
    return file.getvalue()


def _row(number: int, group: Group, sample: Generation) -> dict[str, object]:
    """Return the cells of a sample, by column."""
    return {
        "group": number,
        "row": group.prompt.index,
        "num_prompt_tokens": len(group.prompt.token_ids),
        "prompt_digest": _digest(group.prompt),
        "begun": group.started,
        **{name: getattr(sample, name) for name in OF_SAMPLE},
        **{name: _numbers(getattr(sample, name)) for name in NUMBERS},
        "routes": None if sample.routes is None else array_bytes(sample.routes),
        "turns": [asdict(turn) for turn in sample.turns],
    }


@dataclass(frozen=True)
class SampleRow:
    """A row of a file."""

    path: Path
    numbers: tuple[int, ...]  # the columns `OF_PROMPT`
    sample: Generation


def rows_of(path: Path, places: Integers | None = None) -> list[SampleRow]:
    """Return the rows of a file at the given places, ascending; by default all. Raises Damage."""
    file = _found(path)
    table = file.rows() if places is None else file.take(places, SCHEMA.names)
    with naming(path):
        columns = {name: _arrays(table[name], of) for name, of in NUMBERS.items()}
        columns["routes"] = [cell and array_from(cell) for cell in table["routes"].to_pylist()]
        rows = table.drop_columns([*columns]).to_pylist()
        for name, cells in columns.items():
            for row, cell in zip(rows, cells, strict=True):
                row[name] = cell
        return [SampleRow(path, tuple(row[name] for name in OF_PROMPT), _sample(row)) for row in rows]


def _found(path: Path) -> OwnFile:
    """Find a file, and check its columns. Raises Damage."""
    file = OwnFile.find(path, CONTENT)
    if not file.schema.equals(SCHEMA):
        raise Damage(path, f"cannot be read as {CONTENT}: its columns are {file.schema.names}")
    return file


def read(
    files: Sequence[Path],
    shares: Shares,
    prompt_of: PromptOf,
    opened: Opened | None = None,
) -> dict[int, Group]:
    """Read the groups in files, by number. Collective.

    A share takes the tokens of its own file, or, if there are more or fewer shares than files, those of some groups.

    Args:
        files: the same on every rank.
        shares: of the engine replicas that continue with the groups.
        prompt_of: returns the prompt of a row of the data set. IndexError if there is no such row.
        opened: makes of these prompts those that the policy reads; None: they are the same.

    Raises:
        Damage: a file is missing or damaged.
        UserError: the data set has other prompts than when the files were written.
    """
    return joined(on_each_rank(lambda: _rows_of_share(files, shares)), shares, prompt_of, opened)


def _rows_of_share(files: Sequence[Path], shares: Shares) -> list[SampleRow]:
    """Return the rows that this rank's share takes. Other shares get as many tokens, as far as groups allow (D425)."""
    if len(files) == shares.number:
        return rows_of(files[shares.here])
    found = [*map(_found, files)]
    sizes = [size for file in found for size in file.num_values("token_ids")]
    owners = iter(deal(np.zeros(shares.number, dtype=np.int64), np.array(sizes, dtype=np.int64)))
    mine = list[SampleRow]()
    for file in found:
        taken = [np.arange(group.start, group.stop) for group in file.groups if next(owners) == shares.here]
        mine += rows_of(file.path, np.concatenate(taken)) if taken else []
    return mine


def joined(
    mine: Sequence[SampleRow], shares: Shares, prompt_of: PromptOf, opened: Opened | None = None
) -> dict[int, Group]:
    """Return the groups of the rows of all ranks, as `read` does; `mine` are those of this rank's share. Collective."""
    of_ranks = together(lambda: _RowNumbers.of(mine if shares.reports else (), shares))
    reporter = shares.ranks[shares.here][0] if len(of_ranks) > 1 else 0
    first_of_mine = sum(len(each.numbers) for each in of_ranks[:reporter])
    paths = np.array([path for each in of_ranks for path in each.paths], dtype=object)
    numbers = np.concatenate([each.numbers for each in of_ranks])
    table = torch.cat([each.samples for each in of_ranks], dim=1)
    rows = _ordered(numbers[:, 0], table[ROW["sample"]].numpy())
    numbers = numbers[rows]
    table = table[:, rows]
    replicas = table[ROW["replica"]]
    homes = replicas.to(torch.int64)
    is_mine = replicas.numpy() == shares.here
    replicas[is_mine] = Generation.replica
    own = {place: mine[rows[place] - first_of_mine].sample for place in np.flatnonzero(is_mine).tolist()}
    _, firsts, counts = np.unique(numbers[:, 0], return_index=True, return_counts=True)
    group, row, num_tokens, digest, begun = numbers[firsts].T
    origins = [*zip(paths[rows[firsts]], row.tolist(), strict=True)]
    prompts: Sequence[Prompt] = [_prompt(prompt_of, *origin) for origin in origins]
    if opened:
        prompts = _redistributed(opened(Prompts(prompts=prompts)).prompts, counts, homes, shares)
    for prompt, origin, size, expected in zip(prompts, origins, num_tokens.tolist(), digest.tolist(), strict=True):
        # An environment may begin with other words.
        if len(prompt.token_ids) != size or (not opened and _digest(prompt) != expected):
            raise _other_data(*origin)
    groups = GroupRows(
        prompts=prompts,
        started=torch.from_numpy(begun.copy()),
        counts=torch.from_numpy(counts),
        table=SampleTable(table, own),
    )
    return dict(zip(group.tolist(), groups, strict=True))


def _redistributed(prompts: Sequence[Prompt], counts: Integers, homes: Tensor, shares: Shares) -> Sequence[Prompt]:
    """Return the prompts, with their tokens if this rank's share has samples of them. Collective.

    Groups that are complete enter no session, which would bring their prompts.

    Args:
        prompts: that an environment has opened.
        counts: the samples of each prompt.
        homes: int64, the share that has each sample; negative if it has no token.
        shares: of the samples.
    """
    has_tokens = homes >= 0
    places = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    return redistribute_prompts(prompts, places[has_tokens], homes[has_tokens], shares.ranks)


class _RowNumbers(NamedTuple):
    """The numbers of the rows of a rank that every rank knows."""

    paths: Sequence[Path]  # of the file of each row
    numbers: Integers  # [b, 5]: the columns `OF_PROMPT`
    samples: Tensor  # [9, b] int32, as in `SampleTable`

    @classmethod
    def of(cls, rows: Sequence[SampleRow], shares: Shares) -> "_RowNumbers":
        """Return the numbers of rows that this rank's share has."""
        return cls(
            paths=[row.path for row in rows],
            numbers=np.array([row.numbers for row in rows], dtype=np.int64).reshape(-1, len(OF_PROMPT)),
            samples=SampleTable.of([row.sample.as_remote(shares.here) for row in rows]).numbers,
        )


def _ordered(groups: Integers, samples: npt.NDArray[np.int32]) -> Integers:
    """Return the rows in the order of their groups and, inside groups, of their samples: of equal ones the last."""
    rows = np.lexsort((samples, groups))
    is_last = np.ones(len(rows), dtype=bool)
    is_last[:-1] = (np.diff(groups[rows]) != 0) | (np.diff(samples[rows]) != 0)
    return rows[is_last]


def _prompt(prompt_of: PromptOf, path: Path, row: int) -> Prompt:
    try:
        return prompt_of(row)
    except IndexError:
        raise _other_data(path, row) from None


def _digest(prompt: Prompt) -> int:
    """Return a number of the tokens; 0 of those that an environment made, which may be on other ranks."""
    return seed_of(*map(int, prompt.token_ids)) if prompt.made_by is None else 0


def _sample(row: dict[str, Any]) -> Generation:
    sample = Generation(prompt=0, **{name: row[name] for name in OF_SAMPLE})
    turns = tuple(Turn(**turn) for turn in row["turns"])
    return replace(sample, turns=turns, stop_reason=sample.stop_reason and StopReason(sample.stop_reason))


def _arrays(lists: pa.ChunkedArray, of: Callable[[bytes], object]) -> list[object]:
    """Return the numbers of each row; None of a row that is null."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    numbers = pc.list_flatten(lists).to_numpy()
    parts = np.split(numbers, counts.cumsum()[:-1]) if len(counts) else []
    known = lists.is_valid().to_pylist()
    return [of(part.tobytes()) if is_known else None for part, is_known in zip(parts, known, strict=True)]


def _numbers(column: object) -> object:
    return None if column is None else np.asarray(column)


def _other_data(path: Path, row: int) -> UserError:
    return UserError(
        f"{path} has unfinished responses to row {row} of data.train_files, which has another prompt now: give "
        "the files of the run, or resume with actor_rollout_ref.rollout.partial.enable=false, which drops these "
        "responses"
    )
