"""Every split of a model holds the same model, by Megatron's own description of its shards.

The layout of megarl reads a checkpoint into a split. Megatron's `sharded_state_dict`, which does not use this layout,
gives the place of each local tensor in the complete tensor; the complete tensors must equal those of a single rank. The
layout that follows from sizes alone must equal the layout of the rank's model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.layout import Piece
from tests.support.learners import make_test_learner
from tests.support.ranks import RankPool

PARALLEL = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
DENSE = [{"tp": 2}, {"tp": 4}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}]
SPARSE = [
    {"ep": 2},
    {"tp": 2, "etp": 1},
    {"tp": 2, "ep": 2, "etp": 1},
    {"ep": 2, "etp": 2},
    {"pp": 2, "vpp": 2, "ep": 2},
]
SPLITS = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3-tied": DENSE,
    "gpt_neox": DENSE,
    "mixtral": SPARSE,
    "qwen2_moe": SPARSE,
    "deepseek_v2": SPARSE,
    "deepseek_v3": SPARSE,
    "glm4_moe": [{"tp": 2, "ep": 2, "etp": 1}],
    "glm4_moe_lite": [{"tp": 2, "ep": 2, "etp": 1}],
    "ernie4_5_moe": [{"tp": 2, "ep": 2, "etp": 1}],
    "seed_oss": [{"tp": 2, "pp": 2}],
    "phi3": DENSE,
}
CHECKPOINTS = {variant: (variant, {"num_hidden_layers": 4}) for variant in SPLITS}
SHARD = tuple[
    str, tuple[int, ...], tuple[int, ...], Tensor
]  # name, shape of the complete tensor, first indices, values


def shards(checkpoint: Path, split: dict[str, int]) -> list[SHARD]:
    """Return this rank's shards of a model read from `checkpoint`, as Megatron describes them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from megarl.learner.patches.cpu import megatron_platform
    from megarl.models.trainer import trainer_layout

    learner = make_test_learner(checkpoint, {PARALLEL[axis]: size for axis, size in split.items()}, optim=None)
    sizes_alone = trainer_layout(learner.architecture, learner.mesh.grid, dist.get_rank(), dtype=torch.float32)
    assert sorted(map(placing, learner.layout())) == sorted(map(placing, sizes_alone))
    found: list[SHARD] = []
    for module in learner.modules:
        with megatron_platform():
            state = module.sharded_state_dict(
                metadata={"non_homogeneous_layers": True, "singleton_local_shards": False}
            )
            apply_factories(state)
        for value in leaves(state):
            if isinstance(value, ShardedTensor):
                data = value.data.detach().clone()
                data = data.view((1,) * value.prepend_axis_num + data.shape)
                found.append((value.key, value.global_shape, value.global_offset, data))
    return found


def placing(piece: Piece) -> tuple[Any, ...]:
    """Return all of a piece except the key of its tensor, which may count layers from the first of the stage."""
    return piece.name, piece.box.lo, piece.box.hi, piece.offset, piece.stride, str(piece.dtype)


def leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from leaves(value)
    else:
        yield state


def assemble(found: list[list[SHARD]], num_words: int) -> dict[str, Tensor]:
    """Return the complete tensors. Every element must be present, and ranks that share an element must agree."""
    whole: dict[str, Tensor] = {}
    for key, shape, offset, data in (shard for rank in found for shard in rank):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        places = tuple(slice(first, first + size) for first, size in zip(offset, data.shape, strict=True))
        there = target[places]
        assert torch.equal(there[~there.isnan()], data[~there.isnan()]), f"{key}: ranks differ"
        target[places] = data
    for key, tensor in whole.items():
        if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole[key] = tensor[:num_words]  # the rest is padding; its size depends on the split
        assert not whole[key].isnan().any(), f"{key} has holes"
    return whole


@pytest.mark.parametrize("variant", SPLITS)
def test_every_split_holds_the_same_model(pool: RankPool, checkpoints: dict[str, Path], variant: str) -> None:
    checkpoint = checkpoints[variant]
    expected = assemble(pool.run(1, shards, checkpoint, {}), 211)
    for split in SPLITS[variant]:
        found = assemble(pool.run(4, shards, checkpoint, split), 211)
        assert found.keys() == expected.keys(), split
        for key, tensor in found.items():
            assert torch.equal(tensor, expected[key]), f"{split}: {key}"
