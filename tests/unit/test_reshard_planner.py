"""Plans run on simulated ranks, against gather-then-slice and against sets of element numbers."""

import math
from collections import defaultdict, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.reshard.layout import Box, Piece, row_major, whole
from megarl.reshard.planner import Schedule, make_plan
from megarl.reshard.proof import check_plan
from tests.layouts import architecture, blank, engine_layouts, filled, index_valued, slices, trainer_layouts

FLOAT = torch.float32


def simulate(plans, sources, destinations):
    """Run the plans of all ranks wave by wave; a message is whatever its sender put at that position."""
    for waves in zip(*(plan.waves for plan in plans), strict=True):
        wires = defaultdict(deque)
        for rank, wave in enumerate(waves):
            for send in wave.sends:
                tensor = send.piece.view(sources[rank][send.piece.param])
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


def check(sources, destinations, checkpoint, *, bucket_bytes, ranks_per_node=2, order=None):
    """All the promises of a plan; returns [2][world] bytes sent and received."""
    plans = [
        make_plan(
            sources, destinations, rank=rank, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes, order=order
        )
        for rank in range(len(sources))
    ]
    received = [blank(layout) for layout in destinations]
    simulate(plans, [filled(layout, checkpoint) for layout in sources], received)
    numbers = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in checkpoint.items()}
    itemsize = min(piece.dtype.itemsize for layout in (*sources, *destinations) for piece in layout)
    for rank, plan in enumerate(plans):
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
        for wave in plan.waves:
            assert sum(send.num_bytes for send in wave.sends) <= bucket_bytes
            assert sum(receive.num_bytes for receive in wave.receives) <= bucket_bytes
    schedule = Schedule(sources, destinations, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes, order=order)
    both = [[plan.bytes_sent for plan in plans], [plan.bytes_received for plan in plans]]
    assert schedule.traffic().tolist() == both
    return both


@st.composite
def boxes_of(draw, shape):
    lo = [draw(st.integers(0, extent - 1)) for extent in shape]
    return Box(tuple(lo), tuple(draw(st.integers(low + 1, extent)) for low, extent in zip(lo, shape, strict=True)))


@st.composite
def arbitrary_worlds(draw):
    """Any boxes, overlapping as they like: only the union of the sources is the whole parameter."""
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


@given(arbitrary_worlds(), st.sampled_from([80, 128, 10_000]), st.integers(1, 3))
def test_any_boxes_arrive_with_the_fewest_bytes(world, bucket_bytes, ranks_per_node):
    sources, destinations, checkpoint = world
    check(sources, destinations, checkpoint, bucket_bytes=bucket_bytes, ranks_per_node=ranks_per_node)


@st.composite
def dense_worlds(draw):
    """A trainer and an engine on the same ranks, with more ranks than key/value groups on either side now and then."""
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


@given(dense_worlds(), st.sampled_from([512, 100_000]))
def test_dense_models_reshard_like_gather_then_slice(world, bucket_bytes):
    model, sources, destinations = world
    check(sources, destinations, index_valued(model), bucket_bytes=bucket_bytes, ranks_per_node=4)


def test_nothing_travels_where_both_sides_cut_alike():
    model = architecture()
    _, received = check(
        trainer_layouts(model, tp=2, pp=1, dp=2),
        engine_layouts(model, tp=2, replicas=2),
        index_valued(model),
        bucket_bytes=10_000,
    )
    # The trainer pads the vocabulary by a row more per rank, so a row of both embeddings moves.
    assert received == [0, 2 * model.hidden_size * 4] * 2


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "engine_tp"), [(4, 1, 4, 1), (8, 1, 2, 1), (2, 2, 4, 1), (4, 4, 1, 4), (2, 2, 4, 2)]
)
def test_replicas_share_the_sending(tp, pp, dp, engine_tp):
    model = architecture(num_layers=16, num_key_value_heads=8)
    world = tp * pp * dp
    schedule = Schedule(
        trainer_layouts(model, tp=tp, pp=pp, dp=dp),
        engine_layouts(model, tp=engine_tp, replicas=world // engine_tp),
        ranks_per_node=8,
        bucket_bytes=1 << 20,
    )
    sent, received = schedule.traffic()
    assert sent.max() <= 1.15 * sent.mean(), sent.tolist()
    assert sent.sum() == received.sum() > 0


def piece(name, box, param="local", offset=0, dtype=FLOAT):
    return Piece(name, box, param, offset, row_major(box.shape), dtype)


def test_own_copy_first_then_the_node_then_the_least_loaded():
    """Ranks 0, 1 | 2, 3 are two nodes; ranks 0 and 2 hold `a`, rank 0 alone `b`, and everybody needs both."""
    a, b = Box((0,), (4,)), Box((0,), (2,))
    sources = [[piece("a", a, "x"), piece("b", b, "y")], [], [piece("a", a, "x")], []]
    needs = [piece("a", a, "x"), piece("b", b, "y")]
    plans = [make_plan(sources, [needs] * 4, rank=rank, ranks_per_node=2, bucket_bytes=1000) for rank in range(4)]
    peers = [
        {transfer.piece.name: transfer.peer for wave in plan.waves for transfer in wave.receives} for plan in plans
    ]
    assert peers == [{}, {"a": 0, "b": 0}, {"b": 0}, {"a": 2, "b": 0}]


def test_stages_take_turns():
    model = architecture(num_layers=4)
    layouts = trainer_layouts(model, tp=1, pp=2), engine_layouts(model, tp=1, replicas=2)
    schedule = Schedule(*layouts, ranks_per_node=2, bucket_bytes=1024)
    travelled = list(dict.fromkeys(name for wave in schedule.waves for name, _ in wave if ".layers." in name))
    stages = [int(name.split(".")[2]) // 2 for name in travelled]
    assert all(len(set(stages[start : start + 3])) == 2 for start in range(len(stages) - 2))


def test_the_order_can_be_given():
    model = architecture()
    layouts = trainer_layouts(model, tp=1, pp=3), engine_layouts(model, tp=1, replicas=3)
    order = sorted(index_valued(model), reverse=True)
    schedule = Schedule(*layouts, ranks_per_node=2, bucket_bytes=1024, order=order)
    assert list(dict.fromkeys(name for wave in schedule.waves for name, _ in wave)) == order
    check(*layouts, index_valued(model), bucket_bytes=1024, order=order)


def test_layers_of_a_stage_share_their_routes():
    model = architecture(num_layers=40)
    layouts = trainer_layouts(model, tp=2, pp=4), engine_layouts(model, tp=4, replicas=2)
    schedule = Schedule(*layouts, ranks_per_node=8, bucket_bytes=1 << 20)
    kinds = {id(routes) for wave in schedule.waves for _, routes in wave}
    assert len(kinds) <= 4 * 14 + 3


def test_what_nobody_holds_is_named():
    sources = [[piece("w", Box((0, 0), (2, 3)))], []]
    destinations = [[], [piece("w", Box((1, 0), (4, 3)))]]
    with pytest.raises(ValueError, match=r"reshard w: rank 1 needs \[1:4, 0:3\], of which 3 of 9 elements are held"):
        make_plan(sources, destinations, rank=0, ranks_per_node=2, bucket_bytes=1000)
    with pytest.raises(ValueError, match="reshard w: .* 0 of 9"):
        make_plan([[], []], destinations, rank=0, ranks_per_node=2, bucket_bytes=1000)


def test_a_bucket_below_one_element_per_reader_is_refused():
    sources, destinations = [[piece("w", whole((2,)))], []], [[], [piece("w", whole((2,)))]]
    with pytest.raises(ValueError, match="reshard w: a bucket of 15 bytes is too small"):
        make_plan(sources, destinations, rank=0, ranks_per_node=2, bucket_bytes=15)


def test_one_parameter_of_two_types_is_refused():
    layouts = [[piece("w", whole((2,)))], [piece("w", whole((2,)), dtype=torch.bfloat16)]]
    with pytest.raises(ValueError, match=r"w is torch.bfloat16 on rank 1 and torch.float32 on an earlier"):
        make_plan(layouts, layouts, rank=0, ranks_per_node=2, bucket_bytes=100)


def test_an_element_written_twice_is_refused():
    sources = [[piece("w", whole((4, 2)), "w"), piece("v", whole((2,)), "v")]]
    destinations = [[piece("w", whole((4, 2)), "fused"), piece("v", whole((2,)), "fused", offset=7)]]
    with pytest.raises(ValueError, match=r"rank 0: w \[0:4, 0:2\] and v \[0:2\] share an element of fused"):
        make_plan(sources, destinations, rank=0, ranks_per_node=1, bucket_bytes=100)


def test_an_element_not_written_is_refused():
    layout = [piece("w", whole((4, 2)))]
    plan = make_plan([layout], [layout], rank=0, ranks_per_node=1, bucket_bytes=100)
    with pytest.raises(ValueError, match="rank 0: the plan writes 8 of the 10 elements of local"):
        check_plan(plan, [*layout, piece("v", whole((2,)), offset=8)])


def test_interleaved_columns_do_not_overlap():
    """Two pieces that share rows but no element, as a row-parallel parameter cut twice."""
    halves = [Box((0, 0), (3, 2)), Box((0, 2), (3, 4))]
    layout = [Piece("w", box, "local", box.lo[1], (4, 1), FLOAT) for box in halves]
    plan = make_plan([layout], [layout], rank=0, ranks_per_node=1, bucket_bytes=1000)
    assert len(list(plan.waves[0].written())) == 2
