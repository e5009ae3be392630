"""Samples as parquet files: a row for each sample, with everything that an update needs to learn from it again.

    DIRECTORY/step_40.parquet      the samples that step 40 learnt from
             /val_step_40.parquet  the samples of the validation after 40 steps

Each engine replica writes the samples that it drew. If there are several, `step_40.parquet` is a directory with a file
of each, `part-00002-of-00008.parquet`, as readers of parquet expect it; `reading.py` puts them in order.

A file, or a directory with all its parts, is complete or absent. If the disk refuses a file, training continues without
it. A record is read back bit for bit, with two exceptions: `extra_info`, which only rewards read, is left out, and
ground truths of types that JSON lacks become texts.
"""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from megarl.batch import Rollouts, Scored
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.sharded import Sharded
from megarl.platform.files import discard, publish, remedy, replacing
from megarl.samples.arrays import array_bytes
from megarl.samples.schema import COLUMNS, PROMPT_COLUMNS, SAMPLE_COLUMNS, arrow_schema

logger = logging.getLogger(__name__)

STEP = "step_"
SUFFIX = ".parquet"
PART = "part-{:05}-of-{:05}" + SUFFIX
PARTS = "part-*-of-[0-9][0-9][0-9][0-9][0-9]" + SUFFIX
PLACE = "sample"
"""The column of a part with the place of a sample among all samples of the step."""
PART_BYTES = 1 << 30
"""Texts of prompts that are repeated at once."""
GROUP_TOKENS = 1 << 20  # D425
"""Response tokens of the rows that a reader reads at once (a row group)."""


@dataclass(frozen=True)
class SampleStore:
    """The directory of a run's samples. One rank of each share writes."""

    directory: Path
    replaces: bool = True  # files that exist already

    def save_step(self, samples: Sharded[Scored], baselines: Tensor | None, *, step: int) -> bool:
        """Write the samples of step `step`, counted from 1. Collective.

        Return whether the disk accepted the files, the same on every rank.
        """
        return self._write(f"{STEP}{step}", samples, baselines, step=step)

    def save_validation(self, samples: Sharded[Scored], *, step: int) -> bool:
        """Write the samples of the validation after `step` steps, as `save_step` does."""
        return self._write(f"val_{STEP}{step}", samples, None, step=step)

    def _write(self, name: str, samples: Sharded[Scored], baselines: Tensor | None, *, step: int) -> bool:
        path = self.directory / f"{name}{SUFFIX}"
        unfinished = path.with_name(f".{path.name}.part")
        if not on_first_rank(lambda: self._may_write(path, unfinished)):
            return True

        def attempt(work: Callable[[], None]) -> bool:
            try:
                work()
            except OSError as error:
                logger.warning("%s was not written, training continues: %s", path, remedy(error))
                return False
            return True

        def write() -> None:
            if samples.shares.reports:
                _write_share(unfinished, samples, baselines, step=step)

        if not all(together(lambda: attempt(write))):
            return False
        return on_first_rank(lambda: attempt(lambda: publish(unfinished, path)))

    def _may_write(self, path: Path, unfinished: Path) -> bool:
        """Return whether `path` may be written. Remove what a job that was killed has left unfinished."""
        if path.exists() and not self.replaces:
            logger.warning("%s is not replaced: name another trainer.rollout_data_dir to keep these samples", path)
            return False
        discard(unfinished)
        return True


def _write_share(path: Path, samples: Sharded[Scored], baselines: Tensor | None, *, step: int) -> None:
    """Write the samples of this rank: to `path`, or to its part of the directory `path` if there are other shares."""
    shares = samples.shares
    places = samples.mine
    own = None if baselines is None else baselines[places]
    path.parent.mkdir(parents=True, exist_ok=True)
    if shares.number == 1:
        write_samples(path, samples.share, own, step=step)
    else:
        path.mkdir(exist_ok=True)
        write_samples(path / PART.format(shares.here, shares.number), samples.share, own, step=step, places=places)


def is_one_step(path: Path) -> bool:
    """Return whether `path` is for the samples of one step: a file, or a directory of parts."""
    return not path.is_dir() or any(path.glob(PARTS))


def steps_in(directory: Path) -> dict[int, Path]:
    """Return the files of training steps in a directory by step, ascending."""
    numbers = {path: path.stem.removeprefix(STEP) for path in directory.glob(f"{STEP}*{SUFFIX}")}
    return dict(sorted((int(number), path) for path, number in numbers.items() if number.isdecimal()))


def stored_in(directory: Path) -> dict[str, Path]:
    """Return the files of all steps and validations in a directory by name, in the order of the run."""
    found = [
        (int(path.stem.rpartition("_")[2]), path.stem, path)
        for path in directory.glob(f"*{STEP}*{SUFFIX}")
        if re.fullmatch(rf"(val_)?{STEP}\d+", path.stem)
    ]
    return {name: path for _, name, path in sorted(found)}


def write_samples(
    path: Path, scored: Scored, baselines: Tensor | None, *, step: int, places: Tensor | None = None
) -> None:
    """Write a record to a file.

    Args:
        path: the file.
        scored: the samples.
        baselines: `[B]` float32, or None without baselines.
        step: that learns from them.
        places: `[B]` int64 among all samples of the step; None: the file has all of them.
    """
    table = _table(scored, baselines, step=step)
    if places is not None:
        table = table.append_column(PLACE, pa.array(places.numpy()))
    num_rows = max(1, GROUP_TOKENS * len(scored) // max(1, int(scored.num_tokens.sum())))
    with replacing(path) as file:
        pq.write_table(table, file, row_group_size=num_rows, compression="zstd", write_page_checksum=True)


def write_record(path: Path, batch: Rollouts) -> None:
    """Write every field of a record of any kind, a row for each sample, for inspection.

    A field with a number for each token becomes a list over the response. Fields that are None are left out.
    """
    asked = [batch.prompt_of(sample) for sample in range(len(batch))]
    columns: dict[str, object] = {
        "index": [prompt.index for prompt in asked],
        "prompt": [prompt.text for prompt in asked],
        "prompt_ids": [list(prompt.token_ids) for prompt in asked],
    }
    per_token = dict(batch.columns())
    for name in [field.name for field in fields(batch) if field.name != "prompts"]:
        match getattr(batch, name):
            case Tensor() as values if name == "routes":
                columns[name] = _arrays(values, batch.num_places())
            case Tensor() as values if name == "sequences":
                columns[name] = _lists(values, batch.lengths())
            case Tensor() as values:
                columns[name] = _lists(values, batch.num_tokens) if name in per_token else values.numpy()
            case None:
                pass
            case values:
                columns[name] = list(values)
    with replacing(path) as file:
        pq.write_table(pa.table(columns), file, compression="zstd")


def _table(scored: Scored, baselines: Tensor | None, *, step: int) -> pa.Table:
    """Return a table with a row for each sample, and the columns of its prompt. No other prompt is read."""
    used, places = scored.groups.unique(return_inverse=True)
    read = [scored.prompts[place] for place in used.tolist()]
    of_prompts = {
        "index": [prompt.index for prompt in read],
        "prompt_id": [prompt.prompt_id for prompt in read],
        "data_source": [prompt.data_source for prompt in read],
        "prompt": [prompt.text for prompt in read],
        "prompt_ids": [np.asarray(prompt.token_ids, dtype=np.int32) for prompt in read],
        "ground_truth": [json.dumps(prompt.ground_truth, ensure_ascii=False, default=str) for prompt in read],
    }
    none = [None] * len(scored)

    def per_token(values: Tensor | None) -> pa.ListArray | list[None]:
        return none if values is None else _lists(values, scored.num_tokens)

    of_samples = {
        "step": [step] * len(scored),
        "group": scored.groups.numpy(),
        "response": list(scored.texts),
        "response_ids": per_token(scored.responses),
        "rollout_log_probs": per_token(scored.rollout_log_probs),
        "routes": none if scored.routes is None else _arrays(scored.routes, scored.num_places()),
        "truncated": scored.truncated.tolist(),
        "weight_versions": per_token(scored.weight_versions),
        "observed": none if scored.turn_rewards is None else per_token(~scored.mask),
        "turn_rewards": per_token(scored.turn_rewards),
        "num_turns": none if scored.num_turns is None else scored.num_turns.numpy(),
        "stop_reason": scored.stop_reasons or none,
        "fault": scored.faults or none,
        "score": _numbers(scored.scores),
        "failure": scored.failures or none,
        "accuracy": _numbers(scored.accuracies),
        "answer": scored.answers or none,
        "baseline": none if baselines is None else baselines.numpy(),
    }
    prompts = _repeated(pa.table(of_prompts, schema=arrow_schema(PROMPT_COLUMNS)), places.numpy())
    samples = pa.table(of_samples, schema=arrow_schema(SAMPLE_COLUMNS))
    return pa.Table.from_arrays([*prompts.columns, *samples.columns], names=list(COLUMNS))


def _repeated(prompts: pa.Table, groups: npt.NDArray[np.int64]) -> pa.Table:
    """Return the row of the prompt of each sample, in parts: `take` does not notice texts above 2 GiB."""
    texts = [prompts[name] for name, column in PROMPT_COLUMNS.items() if pa.types.is_string(column.type)]
    sizes = sum(pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64) for column in texts)
    parts = sizes[groups].cumsum() // PART_BYTES
    return pa.concat_tables([prompts.take(part) for part in np.split(groups, np.flatnonzero(np.diff(parts)) + 1)])


def _numbers(values: Tensor) -> pa.Array:
    """Return `[B]` float32 with null in place of NaN."""
    return pa.array(values.numpy(), from_pandas=True)


def _lists(column: Tensor, num_tokens: Tensor) -> pa.ListArray:
    """Turn a column `[N]` into a list for each sample."""
    offsets = torch.nn.functional.pad(num_tokens.cumsum(0), (1, 0)).to(torch.int32)
    return pa.ListArray.from_arrays(offsets.numpy(), column.numpy())


def _arrays(rows: Tensor, counts: Tensor) -> list[bytes]:
    """Return the rows of each sample, `counts` of them, as bytes."""
    return [array_bytes(part) for part in rows.split(counts.tolist())]
