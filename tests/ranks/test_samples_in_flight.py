"""Ranks that resume know all unfinished groups, and each has the tokens of its share alone."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Generation, Group, Prompt, RemoteSample, Sample, float32, int32
from megarl.distributed.sharded import Shares
from megarl.samples.in_flight import IN_FLIGHT_FILES, InFlight
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

NUM_GROUPS, NUM_SAMPLES, NUM_TOKENS = 50, 4, 500
INDEX_BYTES = 100
"""Most bytes that a rank tells of a sample."""


def prompt(row: int) -> Prompt:
    return Prompt(index=row, token_ids=[row, row], text="", data_source="", ground_truth=None, extra_info={})


def sample(row: int, number: int) -> Generation:
    """Return a sample whose tokens name it. The last of each group has none."""
    length = 0 if number == NUM_SAMPLES - 1 else NUM_TOKENS
    tokens, log_probs, versions = int32([row, number] * (length // 2)), float32([-0.5] * length), int32([3] * length)
    routes = torch.full((length + 1, 2, 1), row, dtype=torch.uint8) if length else None
    begun = Generation(0, tokens, log_probs, truncated=False, sample=number, complete=False)
    return replace(begun, weight_versions=versions, routes=routes)


def groups_of(replica: int, num_replicas: int) -> tuple[Group, ...]:
    """Return all groups as a replica knows them: in turn, samples have their tokens there."""

    def known(row: int, number: int) -> Generation | RemoteSample:
        whole, owner = sample(row, number), (row + number) % num_replicas
        return whole if owner == replica else whole.as_remote(owner)  # type: ignore[return-value]

    samples = [tuple(known(row, number) for number in range(NUM_SAMPLES)) for row in range(NUM_GROUPS)]
    return tuple(Group(prompt=prompt(row), samples=of_row, started=3) for row, of_row in enumerate(samples))


def save(directory: Path) -> None:
    shares = Shares.blocks(1)
    groups = groups_of(shares.here, shares.number)
    for name, content in InFlight(groups, shares).files().items():
        (directory / name).write_bytes(content)


def resume(directory: Path, size: int) -> tuple[list[Group], int]:
    """Return the groups that a rank finds, and the bytes that it tells others; a replica has `size` ranks."""
    told = list[int]()
    gather = dist.all_gather_object

    def noted(results: Any, sent: Any, **options: Any) -> None:
        told.append(len(pickle.dumps(sent)))
        gather(results, sent, **options)

    with patch.object(dist, "all_gather_object", noted):
        found = InFlight.read(sorted(directory.glob(IN_FLIGHT_FILES)), Shares.blocks(size), prompt).groups
    return [Group(prompt=group.prompt, samples=tuple(group.samples), started=group.started) for group in found], sum(
        told
    )


def tokens_of(samples: Sequence[Sample]) -> int:
    return sum(each.num_tokens for each in samples if isinstance(each, Generation))


@pytest.mark.parametrize(("num_writers", "num_ranks", "size"), [(1, 1, 1), (3, 1, 1), (2, 2, 1), (1, 2, 1), (3, 4, 2)])
def test_ranks_know_all_groups(pool: RankPool, tmp_path: Path, num_writers: int, num_ranks: int, size: int) -> None:
    """As many replicas as files have their own samples. Others have equally many tokens, as far as groups allow."""
    pool.run(num_writers, save, tmp_path)
    num_replicas = num_ranks // size
    found = pool.run(num_ranks, resume, tmp_path, size)
    assert all(num_bytes < INDEX_BYTES * NUM_GROUPS * NUM_SAMPLES for _, num_bytes in found)
    of_ranks = [[each for group in groups for each in group.samples] for groups, _ in found]
    tokens = [tokens_of(samples) for samples in of_ranks[::size]]
    assert max(tokens) - min(tokens) <= NUM_SAMPLES * NUM_TOKENS
    for rank, (groups, _) in enumerate(found):
        assert [(group.prompt, group.started) for group in groups] == [(prompt(row), 3) for row in range(NUM_GROUPS)]
        for place, each in enumerate(of_ranks[rank]):
            row, number = divmod(place, NUM_SAMPLES)
            whole = sample(row, number)
            homes = [home for home, known in enumerate(of_ranks[::size]) if isinstance(known[place], Generation)]
            if num_writers == num_replicas and whole.num_tokens:
                assert homes == [(row + number) % num_writers]
            assert len(homes) == (1 if whole.num_tokens else num_replicas)
            assert each == (whole if rank // size in homes else whole.as_remote(homes[0])), f"rank {rank}, {row}"
            if isinstance(each, Generation) and each.routes is not None:
                torch.testing.assert_close(each.routes, whole.routes)
