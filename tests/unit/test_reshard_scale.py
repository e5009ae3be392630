"""The plan of one of 2,048 ranks, for models whose tensors would fill hundreds of machines.

The holdings are cut here by hand, not by the rules of `megarl.models`: the counts that are asserted follow from these
cuts alone, and a change of a rule cannot move them. `benchmarks plan` measures the same with those rules.
"""

import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from megarl.reshard.layout import Box, Piece, PlacedBox, ShardedBoxes, row_major
from megarl.reshard.planner import TransferSchedule, lower_bound
from megarl.reshard.proof import check_plan

WORLD, NODE, BUCKET = 2048, 8, 256 << 20
COLUMN, ROW = 0, 1  # the dimension that tensor parallelism cuts


def cut(shape, dim, ranks_by_shard):
    """The shards of a matrix, the `i`-th on the `i`-th ranks."""
    size = shape[dim] // len(ranks_by_shard)
    places = []
    for shard, ranks in enumerate(ranks_by_shard):
        lo, hi = [0, 0], list(shape)
        lo[dim], hi[dim] = shard * size, (shard + 1) * size
        places.append(PlacedBox(Box(tuple(lo), tuple(hi)), tuple(ranks)))
    return ShardedBoxes(tuple(places), torch.bfloat16)


@cache
def engine(shape, dim, tp):
    return cut(shape, dim, [range(shard, WORLD, tp) for shard in range(tp)])


@cache
def trainer(shape, dim, pp, stage, *, tp=1, ep=1, ep_rank=0):
    size = WORLD // pp
    stage_ranks = range(stage * size, (stage + 1) * size)
    return cut(shape, dim, [stage_ranks[ep_rank + shard :: ep * tp] for shard in range(tp)])


def deepseek_v3():
    """Attention matrices and 256 experts in each of 58 layers: PP16 EP16 to TP32."""
    source, destination = {}, {}
    for layer in range(58):
        stage = layer * 16 // 58
        for name, shape, dim in (("q_b", (24576, 1536), COLUMN), ("o", (7168, 16384), ROW)):
            source[f"layers.{layer}.{name}"] = trainer(shape, dim, 16, stage)
            destination[f"layers.{layer}.{name}"] = engine(shape, dim, 32)
        for expert in range(256):
            for name, shape, dim in (
                ("gate", (2048, 7168), COLUMN),
                ("up", (2048, 7168), COLUMN),
                ("down", (7168, 2048), ROW),
            ):
                name = f"layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                source[name] = trainer(shape, dim, 16, stage, ep=16, ep_rank=expert // 16)
                destination[name] = engine(shape, dim, 32)
    return source, destination


def llama_70b():
    """TP8 PP4 to TP8."""
    source, destination = {}, {}
    for layer in range(80):
        for name, shape, dim in (
            ("q", (8192, 8192), COLUMN),
            ("k", (1024, 8192), COLUMN),
            ("o", (8192, 8192), ROW),
            ("gate", (28672, 8192), COLUMN),
            ("down", (8192, 28672), ROW),
        ):
            source[f"layers.{layer}.{name}"] = trainer(shape, dim, 4, layer // 20, tp=8)
            destination[f"layers.{layer}.{name}"] = engine(shape, dim, 8)
    return source, destination


def own(placement, rank):
    """Return the layout of a rank with a separate tensor for every box."""
    boxes = cache(lambda holding: [place.box for place in holding.places if rank in place.ranks])
    return [
        Piece(name, box, name, 0, row_major(box.shape), holding.dtype)
        for name, holding in placement.items()
        for box in boxes(holding)
    ]


def check(source, destination, *, rank, balance, efficiency):
    schedule = TransferSchedule(source, destination, world_size=WORLD, ranks_per_node=NODE, bucket_bytes=BUCKET)
    plan = schedule.plan(rank, own(source, rank), own(destination, rank))
    check_plan(plan)
    traffic = schedule.traffic()
    assert plan.bytes_received == traffic.received[rank] == lower_bound(source, destination, rank=rank)
    assert traffic.sent.max() <= balance * traffic.sent.mean()
    assert len(pickle.dumps(replace(plan, held=(), needed=()))) < 2_000_000
    # The busiest rank determines the time of a wave; all waves take little longer than one without waves.
    loads = np.array([moves.load.ravel() for moves in schedule.hops[0]])
    waves = np.split(schedule.part_of, schedule.ends[:-1])
    busiest = [(np.bincount(wave, minlength=len(loads)) @ loads).max() for wave in waves]
    assert max(busiest) <= BUCKET
    assert sum(busiest) <= efficiency * (np.bincount(schedule.part_of) @ loads).max()
    return schedule, plan


def test_deepseek_v3():
    # The longest of 16 stages has 4 of 58 layers, 10 % more than the mean.
    schedule, plan = check(*deepseek_v3(), rank=777, balance=1.15, efficiency=1.1)
    assert len(schedule.names) == 58 * (2 + 3 * 256)
    assert len(schedule.hops[0]) <= 16 * 2 * (16 + 1)  # moves by stage, expert group and way of cutting
    assert len(plan.templates) < 2000
    assert len({template.peer for template in plan.templates}) < 512


def test_llama_70b():
    schedule, plan = check(*llama_70b(), rank=777, balance=1.001, efficiency=1.05)
    assert len(schedule.hops[0]) <= 4 * 5 * 2
    # Stages have 512 ranks: the rank exchanges data only with its counterparts in the other three.
    assert {template.peer for template in plan.templates} == {265, 777, 1289, 1801}
