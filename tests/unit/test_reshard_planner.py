"""Plans run on simulated ranks, against gather-then-slice and against sets of element numbers."""

import math
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.experts import Experts
from megarl.reshard.layout import Box, Piece, placement_of, row_major, whole
from megarl.reshard.moves import _least_loaded
from megarl.reshard.planner import TransferSchedule, lower_bound, plan_between
from megarl.reshard.proof import check_plan, disagreement
from tests.support.layouts import architecture, blank, engine_layouts, filled, index_valued, slices, trainer_layouts

FLOAT = torch.float32


def simulate(plans, sources, destinations):
    """Run the plans of all ranks wave by wave; a message is what its sender put at that position."""
    for waves in zip(*(plan.waves for plan in plans), strict=True):
        wires = defaultdict(deque)
        for rank, wave in enumerate(waves):
            for send in wave.sends:
                tensor = send.piece.view((destinations if send.forwarded else sources)[rank][send.piece.param])
                wires[rank, send.peer].append((send.piece.name, send.piece.box, tensor.to(send.dtype)))
        for rank, wave in enumerate(waves):
            for copy in wave.copies:
                assert copy.source.box == copy.destination.box
                copy.destination.view(destinations[rank][copy.destination.param]).copy_(
                    copy.source.view(sources[rank][copy.source.param])
                )
            for receive in wave.receives:
                name, box, tensor = wires[receive.peer, rank].popleft()
                assert (name, box, tensor.dtype) == (receive.piece.name, receive.piece.box, receive.dtype)
                receive.piece.view(destinations[rank][receive.piece.param]).copy_(tensor)
        assert not any(wires.values())


def schedule_of(sources, destinations, *, ranks_per_node, bucket_bytes, two_level=False):
    return TransferSchedule(
        placement_of(sources),
        placement_of(destinations),
        world_size=len(sources),
        ranks_per_node=ranks_per_node,
        bucket_bytes=bucket_bytes,
        two_level=two_level,
    )


def check(sources, destinations, checkpoint, **options):
    """Check all promises of a plan; return the traffic."""
    ranks_per_node, bucket_bytes = options["ranks_per_node"], options["bucket_bytes"]
    schedule = schedule_of(sources, destinations, **options)
    plans = [schedule.plan(rank, *layouts) for rank, layouts in enumerate(zip(sources, destinations, strict=True))]
    received = [blank(layout) for layout in destinations]
    simulate(plans, [filled(layout, checkpoint) for layout in sources], received)
    numbers = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in checkpoint.items()}
    itemsize = min(piece.dtype.itemsize for layout in (*sources, *destinations) for piece in layout)
    assert not sum(map(disagreement, plans)).any()
    for rank, plan in enumerate(plans):
        check_plan(plan)
        expected = filled(destinations[rank], checkpoint)
        assert all(
            torch.equal(received[rank][param].nan_to_num(-1), expected[param].nan_to_num(-1)) for param in expected
        )
        held = defaultdict(set)
        for piece in sources[rank]:
            held[piece.name] |= set(numbers[piece.name][slices(piece.box)].flatten().tolist())
        bound = sum(
            len(set(numbers[piece.name][slices(piece.box)].flatten().tolist()) - held[piece.name])
            for piece in destinations[rank]
        )
        assert plan.bytes_received == bound * itemsize
        assert lower_bound(placement_of(sources), placement_of(destinations), rank=rank) == bound * itemsize
        for wave in plan.waves:
            assert sum(send.num_bytes for send in wave.sends) <= bucket_bytes
            assert sum(receive.num_bytes for receive in wave.receives) <= bucket_bytes
    traffic = schedule.traffic()
    assert traffic.sent.tolist() == [plan.bytes_sent for plan in plans]
    assert traffic.received.tolist() == [plan.bytes_received for plan in plans]
    nodes = [[transfer.peer // ranks_per_node for wave in plan.waves for transfer in wave.receives] for plan in plans]
    assert (traffic.crossing > 0).tolist() == [
        bool(set(peers) - {rank // ranks_per_node}) for rank, peers in enumerate(nodes)
    ]
    return traffic


@st.composite
def boxes_of(draw, shape):
    lo = [draw(st.integers(0, extent - 1)) for extent in shape]
    return Box(tuple(lo), tuple(draw(st.integers(low + 1, extent)) for low, extent in zip(lo, shape, strict=True)))


@st.composite
def arbitrary_worlds(draw):
    """Arbitrary, overlapping boxes; the union of the sources is the full parameter."""
    world = draw(st.integers(1, 5))
    checkpoint, sources, destinations = {}, [[] for _ in range(world)], [[] for _ in range(world)]

    def place(side, rank, name, box):
        taken = sum(piece.box.numel for piece in side[rank])
        dims = draw(st.permutations(range(len(box.shape))))
        stride, step = [0] * len(dims), 1
        for dim in dims:
            stride[dim], step = step, step * box.shape[dim]
        side[rank].append(Piece(name, box, "flat", taken, tuple(stride), FLOAT))

    ranks = st.integers(0, world - 1)
    for name in draw(st.sets(st.sampled_from("abc"), min_size=1)):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        checkpoint[name] = torch.arange(math.prod(shape)).float().view(shape) + 1000 * ord(name)
        full = whole(shape)
        cuts = sorted(draw(st.sets(st.integers(1, shape[0])))) if shape else []
        rows = zip([0, *cuts], [*cuts, shape[0] if shape else 0], strict=True)
        tiles = [Box((low, *full.lo[1:]), (high, *full.hi[1:])) for low, high in rows if low < high] or [full]
        for tile in tiles:
            for rank in draw(st.sets(ranks, min_size=1)):
                place(sources, rank, name, tile)
        for box in draw(st.lists(boxes_of(shape), max_size=2)):
            place(sources, draw(ranks), name, box)
        for box in draw(st.lists(boxes_of(shape), max_size=6)):
            place(destinations, draw(ranks), name, box)
    return sources, destinations, checkpoint


@given(arbitrary_worlds(), st.sampled_from([160, 256, 10_000]), st.integers(1, 3), st.booleans())
def test_any_boxes_arrive_with_the_fewest_bytes(world, bucket_bytes, ranks_per_node, two_level):
    check(*world, bucket_bytes=bucket_bytes, ranks_per_node=ranks_per_node, two_level=two_level)


@st.composite
def dense_worlds(draw):
    """A trainer and an engine on the same ranks, sometimes with more ranks than key/value groups."""
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 3, 4])) * (4 // groups)
    model = architecture(
        num_layers=draw(st.integers(1, 3)),
        ffn_hidden_size=4 * draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=draw(st.integers(5, 30)),
        tied_embeddings=draw(st.booleans()),
    )
    trainer_tp, engine_tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2]))
    dp = draw(st.sampled_from([1, 2]))
    if (world := trainer_tp * pp * dp) % engine_tp:
        dp, world = dp * engine_tp, world * engine_tp
    sources = trainer_layouts(model, tp=trainer_tp, pp=pp, dp=dp)
    engine_dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return model, sources, engine_layouts(model, tp=engine_tp, replicas=world // engine_tp, dtype=engine_dtype)


@settings(max_examples=40)
@given(dense_worlds(), st.sampled_from([512, 100_000]), st.booleans())
def test_dense_models_reshard_like_gather_then_slice(world, bucket_bytes, two_level):
    model, sources, destinations = world
    check(sources, destinations, index_valued(model), bucket_bytes=bucket_bytes, ranks_per_node=4, two_level=two_level)


@st.composite
def expert_worlds(draw):
    """Experts cut by expert and by expert tensor parallelism, to an engine that cuts or distributes experts."""
    model = architecture(
        family="qwen3_moe",
        num_layers=2,
        qkv_bias=False,
        experts=Experts(num_experts=4, top_k=2, ffn_hidden_size=8),
    )
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2), (1, 2)))
    splits = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2) if tp * dp % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(splits))
    world = tp * pp * dp
    engine_tp = draw(st.sampled_from([size for size in (1, 2, 4) if world % size == 0]))
    sources = trainer_layouts(model, tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)
    options = {"tp": engine_tp, "replicas": world // engine_tp, "expert_parallel": draw(st.booleans())}
    return model, sources, engine_layouts(model, **options)


@settings(max_examples=30)
@given(expert_worlds(), st.sampled_from([1024, 100_000]), st.booleans())
def test_experts_reshard_like_gather_then_slice(world, bucket_bytes, two_level):
    model, sources, destinations = world
    check(sources, destinations, index_valued(model), bucket_bytes=bucket_bytes, ranks_per_node=4, two_level=two_level)


def test_two_levels_cross_the_network_once_per_node():
    """TP8 to TP2 on two nodes of 4: each holds one half of the model, and two of its ranks need the other half."""
    model = architecture(num_layers=2, num_key_value_heads=8)
    layouts = trainer_layouts(model, tp=8, pp=1), engine_layouts(model, tp=2, replicas=4)
    one, two = (
        check(*layouts, index_valued(model), bucket_bytes=4096, ranks_per_node=4, two_level=two_level)
        for two_level in (False, True)
    )
    assert one.received.tolist() == two.received.tolist()
    assert one.crossing.sum() > 0
    assert two.crossing.sum() == one.crossing.sum() / 2


def test_nothing_travels_where_both_sides_cut_alike():
    model = architecture()
    traffic = check(
        trainer_layouts(model, tp=2, pp=1, dp=2),
        engine_layouts(model, tp=2, replicas=2),
        index_valued(model),
        bucket_bytes=10_000,
        ranks_per_node=2,
    )
    # The trainer pads the vocabulary by a row more per rank, so a row of both embeddings moves.
    assert traffic.received.tolist() == [0, 2 * model.hidden_size * 4] * 2


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "engine_tp"), [(4, 1, 4, 1), (8, 1, 2, 1), (2, 2, 4, 1), (4, 4, 1, 4), (2, 2, 4, 2)]
)
def test_replicas_share_the_sending(tp, pp, dp, engine_tp):
    model = architecture(num_layers=16, num_key_value_heads=8)
    world = tp * pp * dp
    schedule = schedule_of(
        trainer_layouts(model, tp=tp, pp=pp, dp=dp),
        engine_layouts(model, tp=engine_tp, replicas=world // engine_tp),
        ranks_per_node=8,
        bucket_bytes=1 << 20,
    )
    traffic = schedule.traffic()
    assert traffic.sent.max() <= 1.15 * traffic.sent.mean(), traffic.sent.tolist()
    assert traffic.sent.sum() == traffic.received.sum() > 0


def piece(name, box, param="local", offset=0, dtype=FLOAT):
    return Piece(name, box, param, offset, row_major(box.shape), dtype)


def test_sources_prefer_own_rank_then_node_then_load():
    """Ranks 0, 1 | 2, 3 are two nodes; ranks 0 and 2 hold `a`, rank 0 alone `b`, and everybody needs both."""
    a, b = Box((0,), (4,)), Box((0,), (2,))
    sources = [[piece("a", a, "x"), piece("b", b, "y")], [], [piece("a", a, "x")], []]
    needs = [piece("a", a, "x"), piece("b", b, "y")]
    plans = [plan_between(sources, [needs] * 4, rank=rank, ranks_per_node=2, bucket_bytes=1000) for rank in range(4)]
    peers = [
        {transfer.piece.name: transfer.peer for wave in plan.waves for transfer in wave.receives} for plan in plans
    ]
    assert peers == [{}, {"a": 0, "b": 0}, {"b": 0}, {"a": 2, "b": 0}]


def test_stages_take_turns():
    model = architecture(num_layers=4)
    layouts = trainer_layouts(model, tp=1, pp=2), engine_layouts(model, tp=1, replicas=2)
    schedule = schedule_of(*layouts, ranks_per_node=2, bucket_bytes=1024)
    plans = [schedule.plan(rank, layouts[0][rank], layouts[1][rank]) for rank in range(2)]
    sent = np.array([[sum(send.num_bytes for send in wave.sends) for wave in plan.waves] for plan in plans])
    done = np.cumsum(sent, axis=1) / sent.sum(axis=1, keepdims=True)
    assert sent.shape[1] > 10
    assert np.abs(done[0] - done[1]).max() < 1.5 * 1024 / sent.sum(axis=1).min(), "a stage runs ahead of the other"


def test_layers_of_a_stage_share_their_moves():
    model = architecture(num_layers=40)
    layouts = trainer_layouts(model, tp=2, pp=4), engine_layouts(model, tp=4, replicas=2)
    schedule = schedule_of(*layouts, ranks_per_node=8, bucket_bytes=1 << 20)
    assert len(schedule.hops[0]) <= 4 * 14 + 3


def test_elements_without_source_rank_are_named():
    sources = [[piece("w", Box((0, 0), (2, 3)))], []]
    destinations = [[], [piece("w", Box((1, 0), (4, 3)))]]
    with pytest.raises(ValueError, match=r"reshard w: rank 1 needs \[1:4, 0:3\], but ranks hold only 3 of its 9"):
        plan_between(sources, destinations, rank=0, ranks_per_node=2, bucket_bytes=1000)
    with pytest.raises(ValueError, match="reshard w: .* 0 of its 9"):
        plan_between([[], []], destinations, rank=0, ranks_per_node=2, bucket_bytes=1000)


def test_bucket_below_one_element_per_reader_is_refused():
    sources, destinations = [[piece("w", whole((2,)))], []], [[], [piece("w", whole((2,)))]]
    with pytest.raises(ValueError, match="reshard w: a bucket of 15 bytes is too small"):
        plan_between(sources, destinations, rank=0, ranks_per_node=2, bucket_bytes=15)


def test_one_parameter_of_two_types_is_refused():
    layouts = [[piece("w", whole((2,)))], [piece("w", whole((2,)), dtype=torch.bfloat16)]]
    with pytest.raises(ValueError, match=r"w is torch.bfloat16 on rank 1 and torch.float32 on an earlier"):
        plan_between(layouts, layouts, rank=0, ranks_per_node=2, bucket_bytes=100)


def test_an_element_written_twice_is_refused():
    sources = [[piece("w", whole((4, 2)), "w"), piece("v", whole((2,)), "v")]]
    destinations = [[piece("w", whole((4, 2)), "fused"), piece("v", whole((2,)), "fused", offset=7)]]
    with pytest.raises(ValueError, match=r"rank 0: w \[0:4, 0:2\] and v \[0:2\] share an element of fused"):
        plan_between(sources, destinations, rank=0, ranks_per_node=1, bucket_bytes=100)


def test_an_element_not_written_is_refused():
    layout = [piece("w", whole((4, 2)))]
    plan = plan_between([layout], [layout], rank=0, ranks_per_node=1, bucket_bytes=100)
    with pytest.raises(ValueError, match=r"rank 0: the plan writes 0 of the 2 elements of v \[0:2\] in local"):
        check_plan(replace(plan, needed=[*layout, piece("v", whole((2,)), offset=8)]))


def test_forwarding_before_arrival_is_refused():
    model = architecture(num_layers=2, num_key_value_heads=8)
    layouts = trainer_layouts(model, tp=8, pp=1), engine_layouts(model, tp=2, replicas=4)
    schedule = schedule_of(*layouts, ranks_per_node=4, bucket_bytes=4096, two_level=True)
    plan = schedule.plan(1, layouts[0][1], layouts[1][1])
    check_plan(plan)
    with pytest.raises(ValueError, match=r"rank 1: .* is forwarded before it has arrived"):
        check_plan(replace(plan, ends=plan.ends[-1:]))


def test_interleaved_columns_do_not_overlap():
    """Two pieces that share rows but no element, as a row-parallel parameter cut twice."""
    halves = [Box((0, 0), (3, 2)), Box((0, 2), (3, 4))]
    layout = [Piece("w", box, "local", box.lo[1], (4, 1), FLOAT) for box in halves]
    plan = plan_between([layout], [layout], rank=0, ranks_per_node=1, bucket_bytes=1000)
    wave = plan.wave(0)
    assert len(wave.copies) + len(wave.receives) == 2


def test_index_spaces_match_documented_example() -> None:
    sizes = {"a": 4, "b": 4, "c": 8}
    pieces = [Piece(name, whole((size,)), name, 0, (1,), FLOAT) for name, size in sizes.items()]
    schedule = schedule_of([pieces, []], [[], pieces], ranks_per_node=2, bucket_bytes=16)
    assert schedule.param_of.tolist() == [0, 1, 2, 2]
    assert schedule.part_of.tolist() == [0, 0, 1, 2]
    assert schedule.ends.tolist() == [1, 2, 3, 4]
    assert [str(moves.box_of(0)) for moves in schedule.hops[0]] == ["[0:4]", "[0:4]", "[4:8]"]


def one_by_one(load, sent_before, size, num):
    """The loop that `_least_loaded` replaces: give box after box to the least loaded holder, the lower one first."""
    level = (load // size).tolist()
    order = np.lexsort((sent_before, load)).tolist()
    found = []
    for _ in range(num):
        holder = min(order, key=lambda holder: (level[holder], order.index(holder)))
        found.append((level[holder], holder))
        level[holder] += 1
    return [holder for _, holder in sorted(found)]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 10),
    st.integers(1, 20),
)
def test_the_least_loaded_holder_takes_the_next_box(holders, size, num) -> None:
    load, sent_before = np.array(holders, dtype=np.int64).T
    assert _least_loaded(load, sent_before, size, num).tolist() == one_by_one(load, sent_before, size, num)


def test_the_least_loaded_holders_of_the_documented_example() -> None:
    assert _least_loaded(np.array([0, 2, 5]), np.zeros(3, dtype=np.int64), 1, 4).tolist() == [0, 0, 0, 1]
