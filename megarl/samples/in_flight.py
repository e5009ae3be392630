"""The groups that continue in the next step, as files of a checkpoint: a row for each sample.

Each engine replica has a file with the samples whose tokens it has. Prompts are not in the files: they are read again
from the data, by their row.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megarl.batch import Elsewhere, Generation, Group, Prompt, Prompts, Sample, StopReason, Turn, float32, int32
from megarl.data.parquet import OwnFile
from megarl.distributed.exchange import on_each_rank, on_first_rank, together
from megarl.distributed.made_prompts import bring
from megarl.distributed.sharded import Shares
from megarl.platform.errors import UserError
from megarl.platform.seeds import seed_of
from megarl.platform.small_files import Damage, naming
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
        checkpoint: Path,
        shares: Shares,
        prompt_of: PromptOf,
        opened: Opened | None = None,
    ) -> "InFlight":
        """Read the groups in a checkpoint, which may be of a job with other replicas. Collective.

        Arguments and errors as `read`.
        """
        files = on_first_rank(lambda: sorted(checkpoint.glob(IN_FLIGHT_FILES)))
        return cls(tuple(read(files, shares, prompt_of, opened).values()), shares)


NOTHING = InFlight()


def to_bytes(groups: Mapping[int, Group], shares: Shares) -> bytes:
    """Return the content of a file with the samples of groups, by number, whose tokens this rank has.

    The first share has samples without tokens too.
    """
    rows = [
        _row(number, group, sample)
        for number, group in groups.items()
        for sample in group.samples
        if isinstance(sample, Generation) and (sample.num_tokens or shares.here == 0)
    ]
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in SCHEMA]
    file = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), file, compression="zstd", write_page_checksum=True)
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
    group: int
    row: int
    num_prompt_tokens: int
    prompt_digest: int
    begun: int
    sample: Sample


def rows_of(path: Path) -> list[SampleRow]:
    """Return the rows of a file. Raises Damage."""
    table = OwnFile.find(path, CONTENT).rows()
    if not table.schema.equals(SCHEMA):
        raise Damage(path, f"cannot be read as {CONTENT}: its columns are {table.column_names}")
    with naming(path):
        return [
            SampleRow(path=path, sample=_sample(row), **{name: row[name] for name in OF_PROMPT})
            for row in table.to_pylist()
        ]


def read(
    files: Sequence[Path],
    shares: Shares,
    prompt_of: PromptOf,
    opened: Opened | None = None,
) -> dict[int, Group]:
    """Read the groups in files, by number. Each share takes the tokens of some of the files. Collective.

    Args:
        files: the same on every rank.
        shares: of the engine replicas that continue with the groups.
        prompt_of: returns the prompt of a row of the data set. IndexError if there is no such row.
        opened: makes of these prompts those that the policy reads; None: they are the same.

    Raises:
        Damage: a file is missing or damaged.
        UserError: the data set has other prompts than when the files were written.
    """
    taken = files[shares.here :: shares.number]
    mine = on_each_rank(lambda: [row for file in taken for row in rows_of(file)])
    return joined(mine, shares, prompt_of, opened)


def joined(
    mine: Sequence[SampleRow], shares: Shares, prompt_of: PromptOf, opened: Opened | None = None
) -> dict[int, Group]:
    """Return the groups of the rows of all ranks, as `read` does; `mine` are those of this rank. Collective."""
    afar = [replace(row, sample=row.sample.seen_from_afar(shares.here)) for row in mine if shares.reports]
    known = {(row.group, row.sample.sample): row for part in together(lambda: afar) for row in part}
    known |= {(row.group, row.sample.sample): row for row in mine}
    by_group = dict[int, list[SampleRow]]()
    for key in sorted(known):
        by_group.setdefault(key[0], []).append(known[key])
    prompts = [_prompt(rows[0], prompt_of) for rows in by_group.values()]
    asked: Sequence[Prompt] = prompts
    if opened:  # groups that are complete enter no session, which would bring their prompts
        owners = [(place, _home(row.sample, shares)) for place, rows in enumerate(by_group.values()) for row in rows]
        has_tokens = [owner for owner in owners if owner[1] is not None]
        places, homes = torch.tensor(has_tokens, dtype=torch.int64).view(-1, 2).T
        asked = bring(opened(Prompts(prompts=prompts)).prompts, places, homes, shares.ranks)
    groups = {number: _group(rows, prompt) for (number, rows), prompt in zip(by_group.items(), asked, strict=True)}
    if not opened:  # an environment may begin with other words
        for number, rows in by_group.items():
            if _digest(groups[number].prompt) != rows[0].prompt_digest:
                raise _other_data(rows[0])
    return groups


def _home(sample: Sample, shares: Shares) -> int | None:
    """Return the share that has the tokens of a sample; None if it has none."""
    if isinstance(sample, Elsewhere):
        return sample.replica
    return shares.here if sample.num_tokens or sample.complete else None


def _prompt(row: SampleRow, prompt_of: PromptOf) -> Prompt:
    try:
        return prompt_of(row.row)
    except IndexError:
        raise _other_data(row) from None


def _group(rows: Sequence[SampleRow], prompt: Prompt) -> Group:
    first = rows[0]
    if len(prompt.token_ids) != first.num_prompt_tokens:
        raise _other_data(first)
    return Group(prompt=prompt, samples=tuple(row.sample for row in rows), started=first.begun)


def _digest(prompt: Prompt) -> int:
    """Return a number of the tokens; 0 of those that an environment made, which may be on other ranks."""
    return seed_of(*map(int, prompt.token_ids)) if prompt.made_by is None else 0


def _sample(row: dict[str, Any]) -> Generation:
    numbers = {name: of(row[name]) for name, of in NUMBERS.items() if row[name] is not None}
    numbers["routes"] = row["routes"] and array_from(row["routes"])
    sample = Generation(prompt=0, **{name: row[name] for name in OF_SAMPLE} | numbers)
    turns = tuple(Turn(**turn) for turn in row["turns"])
    return replace(sample, turns=turns, stop_reason=sample.stop_reason and StopReason(sample.stop_reason))


def _numbers(column: object) -> object:
    return None if column is None else np.asarray(column)


def _other_data(row: SampleRow) -> UserError:
    return UserError(
        f"{row.path} has unfinished responses to row {row.row} of data.train_files, which has another prompt now: give "
        "the files of the run, or resume with actor_rollout_ref.rollout.partial.enable=false, which drops these "
        "responses"
    )
