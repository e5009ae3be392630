"""The placements of trainer and engine: the short computation against the long one, with every element counted."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.checks import engine_cut_faults
from megarl.models.architecture import LatentAttention, hf_shapes, read_architecture
from megarl.models.config import ModelSection
from megarl.models.engine import engine_layout, engine_placement
from megarl.models.experts import Experts
from megarl.models.grid import Grid
from megarl.models.trainer import trainer_layout, trainer_placement
from megarl.platform.errors import UserError
from megarl.reshard.layout import Box, placement_of
from megarl.rollout.config import RolloutSection
from tests.support.layouts import architecture, slices
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=8, first_dense_layers=1)
LATENT = LatentAttention(q_lora_rank=6, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)


@st.composite
def models(draw):
    """A model of any family that 1, 2 or 4 ranks can share in every way."""
    family = draw(st.sampled_from(["qwen3", "mixtral", "qwen2_moe", "deepseek_v3"]))
    model = architecture(
        family=family,
        num_layers=4,
        vocab_size=draw(st.integers(1, 200)),
        tied_embeddings=draw(st.booleans()),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4, 8])),
    )
    if family == "qwen3":
        return model
    shared = 0 if family == "mixtral" else 8
    experts = replace(
        EXPERTS,
        first_dense_layers=draw(st.integers(0, 4)),
        shared_ffn_hidden_size=shared,
        shared_gate=family == "qwen2_moe",
        router_bias=family == "deepseek_v3",
    )
    latent = replace(LATENT, q_lora_rank=draw(st.sampled_from([None, 6]))) if family == "deepseek_v3" else None
    return replace(
        model, experts=experts, latent=latent, num_key_value_heads=8 if latent else model.num_key_value_heads
    )


@st.composite
def grids(draw):
    pp = draw(st.sampled_from([1, 2, 4]))
    tp, cp, ep, etp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    uneven = pp == 2 and draw(st.booleans())
    return Grid(
        num_ranks=math.lcm(tp * cp, ep * etp) * pp * draw(st.sampled_from([1, 2])),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=2 if pp == 2 and not uneven and draw(st.booleans()) else 1,
        num_layers_in_first_stage=3 if uneven else None,
    )


def comparable(placement):
    """The names in order, each with its type and its places, whose order does not matter."""
    return [(name, held.dtype, Counter((p.box, p.ranks) for p in held.places)) for name, held in placement.items()]


def in_checkpoint_order(layouts, model):
    placement = placement_of(layouts)
    assert placement.keys() == hf_shapes(model).keys()
    return {name: placement[name] for name in hf_shapes(model)}


def copies(model, placement):
    """Return how many ranks have each element of each parameter: one number if it is the same for all elements."""
    found = {}
    for name, shape in hf_shapes(model).items():
        counts = np.zeros(shape, dtype=int)
        for place in placement[name].places:
            counts[slices(place.box)] += len(place.ranks)
        assert counts.min() == counts.max(), name
        found[name] = counts.max()
    return found


def kind(name):
    """How Megatron and vLLM cut a parameter."""
    if ".experts." in name and "shared" not in name:
        return "expert"
    cut = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "b_proj", "embed", "lm_head")
    return "cut" if any(part in name for part in cut) else "copied"


@settings(max_examples=40)
@given(models(), grids())
def test_trainer_placement_is_union_of_all_layouts(model, grid):
    layouts = [trainer_layout(model, grid, rank, dtype=torch.bfloat16) for rank in range(grid.num_ranks)]
    placement = trainer_placement(model, grid, dtype=torch.bfloat16)
    assert comparable(placement) == comparable(in_checkpoint_order(layouts, model))
    stage = grid.num_ranks // grid.pp
    ranks_of = {"cut": stage // grid.tp, "expert": stage // (grid.ep * grid.etp), "copied": stage}
    for name, number in copies(model, placement).items():
        twice = name == "model.embed_tokens.weight" and model.tied_embeddings and grid.pp > 1
        assert number == ranks_of[kind(name)] * (1 + twice), name


@settings(max_examples=40)
@given(models(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.booleans())
def test_engine_placement_is_union_of_all_layouts(model, tp_size, replicas, expert_parallel):
    layouts = [
        engine_layout(
            model,
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            expert_parallel=expert_parallel,
            dtype=torch.bfloat16,
            latent_fused=True,
        )
        for rank in range(tp_size * replicas)
    ]
    placement = engine_placement(
        model,
        num_ranks=tp_size * replicas,
        tp_size=tp_size,
        expert_parallel=expert_parallel,
        dtype=torch.bfloat16,
    )
    assert comparable(placement) == comparable(in_checkpoint_order(layouts, model))
    kv_copies = max(1, tp_size // model.num_key_value_heads)
    for name, number in copies(model, placement).items():
        copied = tp_size if kind(name) == "copied" else kv_copies if "k_proj" in name or "v_proj" in name else 1
        assert number == replicas * copied, name


def test_tied_embedding_is_on_first_and_last_stage():
    """2 stages of 2 tensor ranks: 121 rows are 2 slices of 64, the second short of 7."""
    model = architecture(num_layers=2, tied_embeddings=True)
    placement = trainer_placement(model, Grid(num_ranks=4, tp=2, pp=2), dtype=torch.float32)
    assert [(str(place.box), place.ranks) for place in placement["model.embed_tokens.weight"].places] == [
        ("[0:64, 0:8]", (0, 2)),
        ("[64:121, 0:8]", (1, 3)),
    ]
    assert "lm_head.weight" not in placement


@pytest.mark.parametrize(
    ("expert_parallel", "gate", "down"),
    [
        (False, [("w13_weight", 0, "[4:8, 0:8]"), ("w13_weight", 128, "[4:8, 0:8]")], ("w2_weight", 64, "[0:8, 4:8]")),
        (True, [("w13_weight", 0, "[0:8, 0:8]")], ("w2_weight", 0, "[0:8, 0:8]")),
    ],
)
def test_the_engine_fuses_its_experts(expert_parallel, gate, down):
    """3 experts of 8 rows of 8 on 2 ranks: rank 1 has the lower half of each, or the last of them whole."""
    model = architecture(family="mixtral", experts=replace(EXPERTS, num_experts=3))
    layout = engine_layout(
        model, tp_rank=1, tp_size=2, expert_parallel=expert_parallel, dtype=torch.float32, latent_fused=False
    )
    prefix = "model.layers.1.block_sparse_moe.experts."
    found = {
        piece.name.removeprefix(prefix): (
            piece.param.removeprefix(prefix + "routed_experts."),
            piece.offset,
            str(piece.box),
        )
        for piece in layout
        if piece.name.startswith(prefix)
    }
    numbers = [2] if expert_parallel else [0, 1, 2]
    assert found.keys() == {f"{number}.{half}.weight" for number in numbers for half in ("w1", "w2", "w3")}
    assert [found[f"{number}.w1.weight"] for number in (0, 2) if number in numbers] == gate
    assert found["2.w2.weight"] == down


def test_latent_attention_is_fused_where_engine_fuses_it():
    model = architecture(family="deepseek_v3", latent=LATENT, num_key_value_heads=8)
    settings = {"tp_rank": 1, "tp_size": 2, "expert_parallel": False, "dtype": torch.float32}
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    for fused, expected in ((True, ("fused_qkv_a_proj.weight", 6 * 8)), (False, ("kv_a_proj_with_mqa.weight", 0))):
        [piece] = [p for p in engine_layout(model, latent_fused=fused, **settings) if p.name == name]
        assert (piece.param.removeprefix("model.layers.0.self_attn."), piece.offset) == expected
        assert piece.box == Box((0, 0), (6, 8))


def test_the_largest_model_has_few_kinds_of_holdings():
    """DeepSeek-V3 on 2,048 ranks: what the planner works out is worked out for some hundreds, not for 45,395."""
    model = replace(
        architecture(family="deepseek_v3", num_layers=61, num_attention_heads=128, num_key_value_heads=128),
        ffn_hidden_size=64,
        experts=Experts(
            num_experts=256,
            top_k=8,
            ffn_hidden_size=32,
            shared_ffn_hidden_size=32,
            first_dense_layers=3,
            router_bias=True,
        ),
        latent=LATENT,
    )
    grid = Grid(num_ranks=2048, pp=16, ep=16, num_layers_in_first_stage=4, num_layers_in_last_stage=1)
    trainer = trainer_placement(model, grid, dtype=torch.bfloat16)
    engine = engine_placement(model, num_ranks=2048, tp_size=32, expert_parallel=False, dtype=torch.bfloat16)
    assert [*trainer] == [*engine] == [*hf_shapes(model)]
    assert len(trainer) == 45_395
    assert len({id(holding) for holding in trainer.values()}) < 1000
    assert len({id(holding) for holding in engine.values()}) < 50


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6])
@given(vocab_size=st.integers(3, 700), variant=st.sampled_from(sorted(VARIANTS)), expert_parallel=st.booleans())
@settings(max_examples=40, deadline=None)
def test_engine_boxes_cover_parameter_or_raise_fault(
    tp_size: int, vocab_size: int, variant: str, expert_parallel: bool
) -> None:
    model = read_architecture(SIZES | VARIANTS[variant] | {"vocab_size": vocab_size})
    cut = {"tp_size": tp_size, "expert_parallel": expert_parallel, "dtype": torch.float32}
    try:
        layouts = [engine_layout(model, tp_rank=rank, latent_fused=False, **cut) for rank in range(tp_size)]
    except UserError as error:
        assert "do not divide" in str(error)
        with pytest.raises(UserError, match="do not divide"):
            engine_placement(model, num_ranks=tp_size, **cut)
        return
    covered = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in hf_shapes(model).items()}
    for piece in (piece for layout in layouts for piece in layout):
        covered[piece.name][tuple(slice(lo, hi) for lo, hi in zip(piece.box.lo, piece.box.hi, strict=True))] = True
    assert [name for name, mask in covered.items() if not mask.all()] == []


def test_vocabulary_not_divisible_by_engine_ranks_is_fault(tmp_path: Path) -> None:
    model = read_architecture(SIZES | VARIANTS["llama"] | {"num_attention_heads": 3, "num_key_value_heads": 3})
    with pytest.raises(UserError, match="256 rows or columns of model.embed_tokens.weight do not divide into 3"):
        engine_layout(model, tp_rank=0, tp_size=3, expert_parallel=False, dtype=torch.float32, latent_fused=False)
    write_checkpoint(tmp_path, "llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
    rollout = RolloutSection(tensor_model_parallel_size=3)
    section = ModelSection(path=str(tmp_path))
    [fault] = engine_cut_faults(section, rollout, num_ranks=3)
    assert fault.path == "actor_rollout_ref.rollout.tensor_model_parallel_size"
    assert "3 does not divide the 256 rows of the engine's vocabulary (211 of" in fault.message
