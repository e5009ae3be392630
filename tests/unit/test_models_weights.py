"""The table against tensors built the other way round: fuse index-valued Hugging Face tensors, cut, compare boxes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.architecture import Architecture, hf_shapes
from megarl.models.weights import pieces

BASE = Architecture(
    family="qwen3",
    num_layers=2,
    hidden_size=6,
    ffn_hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=11,
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
)
PADDING = -1


def index_valued(architecture):
    """Every element of the checkpoint is its own number."""
    tensors, first = {}, 0
    for name, shape in hf_shapes(architecture).items():
        tensors[name] = torch.arange(first, first := first + math.prod(shape)).view(shape)
    return tensors


def fuse(architecture, hf, tp_size, *, transformer_engine):
    """Megatron's parameters of the whole model, each as the list of its tensor-parallel shards."""
    groups = architecture.num_key_value_heads
    per_group = architecture.num_attention_heads // groups
    head = architecture.head_dim

    def pad(vocabulary):
        rows = -(-len(vocabulary) // (3 * tp_size)) * 3 * tp_size
        padding = torch.full((rows - len(vocabulary), vocabulary.shape[1]), PADDING)
        return torch.cat([vocabulary, padding]).chunk(tp_size)

    def qkv(prefix, suffix):
        q, k, v = (hf[f"{prefix}self_attn.{x}_proj.{suffix}"] for x in "qkv")
        blocks = []
        for group in range(groups):
            for query in range(group * per_group, (group + 1) * per_group):
                blocks.append(q[query * head : (query + 1) * head])
            blocks += [k[group * head : (group + 1) * head], v[group * head : (group + 1) * head]]
        return torch.cat(blocks).chunk(tp_size)

    def gate_up(prefix):
        gate, up = hf[f"{prefix}mlp.gate_proj.weight"], hf[f"{prefix}mlp.up_proj.weight"]
        return [torch.cat(pair) for pair in zip(gate.chunk(tp_size), up.chunk(tp_size), strict=True)]

    def copies(name):
        return [hf[name]] * tp_size

    attention_norm = "self_attention.linear_qkv.layer_norm_weight" if transformer_engine else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if transformer_engine else "pre_mlp_layernorm.weight"
    head_name = "model.embed_tokens.weight" if architecture.tied_embeddings else "lm_head.weight"
    shards = {
        "embedding.word_embeddings.weight": pad(hf["model.embed_tokens.weight"]),
        "output_layer.weight": pad(hf[head_name]),
        "decoder.final_layernorm.weight": copies("model.norm.weight"),
    }
    for number in range(architecture.num_layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        shards |= {
            ours + attention_norm: copies(theirs + "input_layernorm.weight"),
            ours + mlp_norm: copies(theirs + "post_attention_layernorm.weight"),
            ours + "self_attention.linear_qkv.weight": qkv(theirs, "weight"),
            ours + "self_attention.linear_proj.weight": hf[theirs + "self_attn.o_proj.weight"].chunk(tp_size, dim=1),
            ours + "mlp.linear_fc1.weight": gate_up(theirs),
            ours + "mlp.linear_fc2.weight": hf[theirs + "mlp.down_proj.weight"].chunk(tp_size, dim=1),
        }
        if architecture.qkv_bias:
            shards[ours + "self_attention.linear_qkv.bias"] = qkv(theirs, "bias")
        if architecture.qk_norm:
            shards[ours + "self_attention.q_layernorm.weight"] = copies(theirs + "self_attn.q_norm.weight")
            shards[ours + "self_attention.k_layernorm.weight"] = copies(theirs + "self_attn.k_norm.weight")
    return shards


@st.composite
def cases(draw):
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    groups = draw(st.integers(1, 4))
    heads = groups * draw(st.integers(1, 4))
    head_dim = draw(st.integers(1, 4))
    while (heads + 2 * groups) * head_dim % tp_size or heads * head_dim % tp_size:
        head_dim += 1
    architecture = replace(
        BASE,
        hidden_size=draw(st.integers(1, 7)),
        ffn_hidden_size=tp_size * draw(st.integers(1, 4)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 40)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    return architecture, tp_size, draw(st.booleans())


def cut(architecture, name, tensor, tp_rank, tp_size):
    return pieces(
        architecture,
        name,
        tuple(tensor.shape),
        param="local",
        dtype=tensor.dtype,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


@given(cases())
def test_every_piece_is_its_box_and_all_of_them_are_the_tensor(case):
    architecture, tp_size, transformer_engine = case
    hf = index_valued(architecture)
    for name, shards in fuse(architecture, hf, tp_size, transformer_engine=transformer_engine).items():
        for tp_rank, shard in enumerate(shards):
            local = shard.contiguous()
            uncovered = local.clone()
            for piece in cut(architecture, name, local, tp_rank, tp_size):
                box = tuple(slice(low, high) for low, high in zip(piece.box.lo, piece.box.hi, strict=True))
                assert torch.equal(piece.view(local), hf[piece.name][box]), (name, tp_rank, piece)
                piece.view(uncovered).fill_(PADDING)
            assert (uncovered == PADDING).all(), (name, tp_rank)


def test_more_ranks_than_groups_cut_a_group_apart():
    """2 groups of [2 query heads; k; v] x 2 rows are 16 fused rows: rank 3 of 4 holds k and v of group 1."""
    found = pieces(
        BASE,
        "decoder.layers.1.self_attention.linear_qkv.weight",
        (4, 6),
        param="qkv",
        dtype=torch.float32,
        tp_rank=3,
        tp_size=4,
    )
    assert [(piece.name, str(piece.box), piece.offset) for piece in found] == [
        ("model.layers.1.self_attn.k_proj.weight", "[2:4, 0:6]", 0),
        ("model.layers.1.self_attn.v_proj.weight", "[2:4, 0:6]", 12),
    ]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.layers.0.mlp.router.weight", (4, 6), "no rule"),
        ("decoder.layers.2.input_layernorm.weight", (6,), "no parameter model.layers.2.input_layernorm.weight"),
        ("decoder.final_layernorm.weight", (3,), r"shape \(3,\) .* model.norm.weight \[0:6\]"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (6, 6), "does not fit"),
        ("decoder.layers.0.mlp.linear_fc2.weight", (4, 6), "does not fit"),
        ("embedding.word_embeddings.weight", (5, 6), "10 rows on 2 ranks cannot hold 11 rows"),
        ("embedding.word_embeddings.weight", (6, 5), "does not fit"),
    ],
)
def test_a_parameter_that_is_not_what_the_table_says_is_refused(name, shape, message):
    with pytest.raises(ValueError, match=message):
        pieces(BASE, name, shape, param="local", dtype=torch.float32, tp_rank=0, tp_size=2)
