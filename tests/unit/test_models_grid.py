"""The layout of the ranks against Megatron's own functions."""

from types import SimpleNamespace

import pytest
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.models.grid import Grid


@pytest.mark.parametrize(
    "grid",
    [
        Grid(num_ranks=8, tp=2),
        Grid(num_ranks=24, tp=2, pp=3, cp=2),
        Grid(num_ranks=16, tp=2, pp=2, ep=2),
        Grid(num_ranks=16, tp=4, pp=2, ep=4, etp=1),
        Grid(num_ranks=32, tp=2, pp=2, cp=2, ep=2, etp=4),
    ],
)
def test_coordinates_are_those_of_megatrons_groups(grid):
    order = "tp-cp-ep-dp-pp"
    experts_dp = grid.num_ranks // (grid.etp * grid.ep * grid.pp)
    dense = RankGenerator(tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order=order)
    expert = RankGenerator(tp=grid.etp, ep=grid.ep, dp=experts_dp, pp=grid.pp, cp=1, order=order)
    for ranks, axis, coordinate in (
        (dense, "tp", lambda rank: grid.cut(rank).tp_rank),
        (dense, "pp", grid.stage),
        (expert, "tp", lambda rank: grid.cut(rank).etp_rank),
        (expert, "ep", lambda rank: grid.cut(rank).ep_rank),
        (expert, "pp", grid.stage),
    ):
        for group in ranks.get_ranks(axis):
            assert [coordinate(rank) for rank in group] == [*range(len(group))], (axis, group)
    for group in expert.get_ranks("dp"):
        assert len({grid.cut(rank).ep_rank for rank in group}) == 1


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "first", "last"),
    [
        (8, 1, 1, None, None),
        (8, 4, 1, None, None),
        (8, 2, 2, None, None),
        (24, 3, 4, None, None),
        (7, 3, 1, 1, None),
        (7, 3, 1, None, 3),
        (9, 4, 1, 3, 2),
        (5, 2, 1, 3, 2),
        (16, 4, 2, 2, 6),
        (61, 16, 1, 4, 1),
    ],
)
def test_layers_are_those_megatron_builds(num_layers, pp, vpp, first, last):
    grid = Grid(num_ranks=pp, pp=pp, vpp=vpp, num_layers_in_first_stage=first, num_layers_in_last_stage=last)
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for stage in range(pp):
        chunks = []
        for chunk in range(vpp):
            start = get_transformer_layer_offset(config, chunk if vpp > 1 else None, stage)
            chunks.append(range(start, start + get_num_layers_to_build(config, chunk if vpp > 1 else None, stage)))
        assert grid.layers(stage, num_layers) == chunks
    together = [layer for stage in range(pp) for chunk in grid.layers(stage, num_layers) for layer in chunk]
    assert sorted(together) == [*range(num_layers)]


def test_chunks_take_turns():
    """Megatron's example: 8 layers on 2 stages of 2 chunks."""
    grid = Grid(num_ranks=2, pp=2, vpp=2)
    assert grid.layers(0, 8) == [range(0, 2), range(4, 6)]
    assert grid.layers(1, 8) == [range(2, 4), range(6, 8)]
