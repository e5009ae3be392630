"""Prompts that one rank has made: their tokens reach the ranks that need them, and no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Generation, Prompt, Prompts, Rewarded, Rollouts, float32, int32
from megarl.distributed.made_prompts import TokensElsewhere, redistribute_prompts
from megarl.distributed.redistribution import redistribute
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Shares, shard
from megarl.samples.in_flight import SampleRow, joined
from tests.support.ranks import RankPool
from tests.support.records import answer, prompts

pytestmark = pytest.mark.ranks

LENGTHS = [2, 5, 3, 4, 1, 6]  # of the prompts; the last is of the data, the others are of rank 0, 1, 2, 3, 0
GROUPS = len(LENGTHS)
RESPONSES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
WHOLE: list[Prompt] = [replace(prompt, text=f"{prompt.index}") for prompt in prompts(LENGTHS).prompts]
WHOLE[1] = replace(WHOLE[1], fault="no begin")
ALL = list(range(GROUPS))
DRAWN_BY = [0, 1, 0, 1, 0, 1]  # the replica of two ranks
LEARNT_BY = [(3, 1), (1, 0), (2, 2), (3, 1), (1, 0), (2, 2)]  # the rank of each of two samples


def has_made(rank: int) -> list[int]:
    """Return the prompts that a rank of four has made or read."""
    return [place for place in ALL if place % 4 == rank or place == GROUPS - 1]


def as_made() -> list[Prompt]:
    """Return the prompts as this rank knows them after they were made."""
    found = list[Prompt]()
    for place, prompt in enumerate(WHOLE):
        maker = place % dist.get_world_size()
        made = replace(prompt, made_by=maker)
        if prompt is WHOLE[-1]:
            found.append(prompt)
        elif maker == dist.get_rank():
            found.append(made)
        else:
            found.append(replace(made, token_ids=TokensElsewhere(LENGTHS[place]), text="", fault=None))
    return found


def known(found: Any) -> list[int]:
    """Return the prompts whose tokens this rank knows. Check what it knows of them, and the lengths of all."""
    assert [len(prompt.token_ids) for prompt in found] == LENGTHS
    own = [place for place, prompt in enumerate(found) if not isinstance(prompt.token_ids, TokensElsewhere)]
    assert [replace(found[place], made_by=None) for place in own] == [WHOLE[place] for place in own]
    return own


def brought(owners: list[int], size: int) -> list[int]:
    shares = Shares.blocks(size)
    return known(redistribute_prompts(as_made(), torch.arange(GROUPS), torch.tensor(owners), shares.ranks))


@pytest.mark.parametrize(("owners", "size"), [([3, 3, 0, 0, 3, 0], 1), ([1, 0, 0, 1, 1, 1], 2)])
def test_tokens_reach_those_who_need_them(pool: RankPool, owners: list[int], size: int) -> None:
    """A rank also keeps what it has made."""
    for rank, found in enumerate(pool.run(4, brought, owners, size)):
        assert found == [place for place in ALL if owners[place] == rank // size or place in has_made(rank)]


def learnt() -> tuple[list[int], list[int], list[int] | None]:
    """Return the prompts that this rank knows when it has drawn, when it learns, and when the first rank gets all."""
    record: Rollouts = answer(prompts(LENGTHS), RESPONSES)
    drawn_by, learnt_by = torch.tensor(DRAWN_BY).repeat_interleave(2), torch.tensor(LEARNT_BY).flatten()
    replicas = Shares.blocks(2)
    mine = redistribute_prompts(as_made(), torch.arange(GROUPS), torch.tensor(DRAWN_BY), replicas.ranks)
    rewarded = replace(record, prompts=mine).extend(Rewarded, scores=torch.arange(len(record)) / 2)
    samples = redistribute(
        shard(rewarded, drawn_by, replicas), Rewarded, Runs.of(record.groups, learnt_by), Shares.blocks(1)
    )
    whole = shard(record, learnt_by, Shares.blocks(1)).share.tokens()
    assert torch.equal(samples.share.tokens(), whole)
    everything = samples.to_first_rank()
    return known(mine), known(samples.index.prompts), None if everything is None else known(everything.prompts)


def test_tokens_follow_the_samples(pool: RankPool) -> None:
    for rank, (drawn, learning, everything) in enumerate(pool.run(4, learnt)):
        assert drawn == [place for place in ALL if DRAWN_BY[place] == rank // 2 or place in has_made(rank)]
        assert learning == [place for place in ALL if rank in LEARNT_BY[place] or place in drawn]
        assert everything == (ALL if rank == 0 else None)


def resumed() -> list[int]:
    """Return the prompts that this rank knows when groups continue: complete, begun, and without tokens."""
    shares = Shares.blocks(2)
    begun = Generation(0, int32([1]), float32([-1.0]), truncated=False, complete=False)
    samples = [replace(begun, complete=True), begun, replace(begun, token_ids=int32())]
    rows = [
        SampleRow(Path("file"), (place, place, LENGTHS[place], 0, 0), sample)
        for place, sample in enumerate(samples * 2)
        if DRAWN_BY[place] == shares.here
    ]
    opened = Prompts(prompts=as_made())
    found = joined(rows, shares, WHOLE.__getitem__, lambda rows: opened)
    return known([found[place].prompt for place in ALL])


def test_tokens_reach_groups_that_continue(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(4, resumed)):
        has_tokens = [place for place in ALL if DRAWN_BY[place] == rank // 2 and place % 3 < 2]
        assert found == sorted({*has_tokens, *has_made(rank)})
