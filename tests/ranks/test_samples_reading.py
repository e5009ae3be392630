"""Each rank reads its own rows of kept samples, and every rank knows the same of all samples."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Scored
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Index, Sharded, Shares, shard
from megarl.platform.small_files import Damage
from megarl.samples import store
from megarl.samples.reading import read_samples
from megarl.samples.store import SampleStore, write_samples
from tests.support.kept import read_all
from tests.support.ranks import RankPool
from tests.support.records import answer, prompts

pytestmark = pytest.mark.ranks

BYTES_OF_NUMBERS = 500_000
"""Of prompts, numbers of samples and footers, which every rank reads, and of Python itself."""


def drawn(lengths: list[int], num_prompts: int) -> Scored:
    """Return samples with tokens that no compression shortens, routes, and a failure."""
    generator = torch.Generator().manual_seed(len(lengths))
    record = answer(prompts([3] * num_prompts), lengths)
    total, num_places = len(record.mask), int(record.num_places().sum())
    record = replace(
        record,
        responses=torch.randint(1 << 30, (total,), generator=generator, dtype=torch.int32),
        rollout_log_probs=torch.randn(total, generator=generator),
        routes=torch.randint(250, (num_places, 2, 1), generator=generator, dtype=torch.uint8),
    )
    scores = torch.rand(len(lengths), generator=generator)
    failures = ["it took too long", *[None] * (len(lengths) - 1)]
    texts = [f"text {number}" for number in range(len(lengths))]
    scores[0] = torch.nan
    return record.extend(Scored, texts=texts, scores=scores, accuracies=scores, failures=failures)


def num_bytes_read() -> int:
    """Return the bytes that this process has read of files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def read(path: Path) -> tuple[Sharded[Scored], Tensor | None, int]:
    before = num_bytes_read()
    samples, baselines = read_samples(path, Shares.blocks(1))
    return samples, baselines, num_bytes_read() - before


def kept(directory: Path, record: Scored, owners: Tensor, baselines: Tensor) -> None:
    """Keep samples that several ranks have drawn."""
    with patch.object(store, "GROUP_TOKENS", 8):
        SampleStore(directory).save_step(shard(record, owners, Shares.blocks(1)), baselines, step=1)


def assert_equal(found: Any, expected: Any) -> None:
    for each in fields(expected):
        ours, theirs = getattr(found, each.name), getattr(expected, each.name)
        if isinstance(theirs, Runs):
            assert_equal(ours, theirs)
        elif isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True, msg=each.name)
        else:
            assert ours == theirs, each.name


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_writers", [1, 3])
@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 9, 2, 6], [2, 3]])  # two samples are too few for four ranks
def test_ranks_have_all_samples_together(
    pool: RankPool, tmp_path: Path, lengths: list[int], num_writers: int, num_ranks: int
) -> None:
    record, baselines = drawn(lengths, num_prompts=len(lengths) // 2), torch.rand(len(lengths))
    owners = torch.arange(len(lengths)) * 2 % num_writers
    pool.run(num_writers, kept, tmp_path, record, owners, baselines)
    parts = [samples for samples, *_ in pool.run(num_ranks, read, tmp_path / "step_1.parquet")]
    whole, of_all = read_all(tmp_path / "step_1.parquet")
    assert_equal(whole, record)
    assert torch.equal(of_all, baselines)  # type: ignore[arg-type]
    sizes = [len(samples.share) for samples in parts]
    assert sum(sizes) == len(record) and max(sizes) - min(sizes) <= 1
    for samples in parts:
        assert_equal(samples.index, Index.of(record, samples.index.owners))
        assert_equal(samples.share, record.select(samples.mine))
        assert torch.equal(samples.index.owners, parts[0].index.owners)


def test_a_rank_reads_little_more_than_its_rows(pool: RankPool, tmp_path: Path) -> None:
    record = drawn([4096] * 64, num_prompts=16)
    with patch.object(store, "GROUP_TOKENS", 4 * 4096):
        write_samples(tmp_path / "file", record, None, step=1)
    size = (tmp_path / "file").stat().st_size
    assert size > 8 * 4096 * 64
    [(_, _, alone)] = pool.run(1, read, tmp_path / "file")
    assert size <= alone <= size + BYTES_OF_NUMBERS
    for _, _, num_bytes in pool.run(4, read, tmp_path / "file"):
        assert size / 4 <= num_bytes <= size / 4 + BYTES_OF_NUMBERS


def complaint(path: Path) -> str:
    with pytest.raises(Damage) as damage:
        read_samples(path, Shares.blocks(1))
    dist.barrier()
    return str(damage.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weight_versions", "column weight_versions: it is null in 4 of 8 rows"),
        ("score", "column score: it is null in"),
        ("response_ids", "column response_ids: it is null in 4 of 4 rows"),
    ],
)
def test_faults_of_a_rank_are_raised_on_all(pool: RankPool, tmp_path: Path, name: str, said: str) -> None:
    write_samples(tmp_path / "file", drawn([3, 1, 4, 1, 5, 9, 2, 6], num_prompts=4), None, step=1)
    table = pq.read_table(tmp_path / "file")
    place = table.schema.get_field_index(name)
    values = pa.array([*table[name].to_pylist()[:4], *[None] * 4], table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), values), tmp_path / "file")
    first, second = pool.run(2, complaint, tmp_path / "file")
    assert first == second and (said in first or name == "score")
