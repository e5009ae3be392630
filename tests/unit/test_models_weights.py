"""The table against tensors built the other way round: fuse index-valued Hugging Face tensors, cut, compare boxes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.architecture import Architecture, LatentAttention, hf_shapes
from megarl.models.experts import Experts
from megarl.models.grid import Cut, Grid
from megarl.models.trainer import parameter_shapes
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
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
)
EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=4, first_dense_layers=1)
LATENT = LatentAttention(q_lora_rank=6, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=3)
PADDING = -1
PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}


def index_valued(architecture):
    """Every element of the checkpoint is its own number."""
    tensors, first = {}, 0
    for name, shape in hf_shapes(architecture).items():
        tensors[name] = torch.arange(first, first := first + math.prod(shape)).view(shape)
    return tensors


class Megatron:
    """One rank's parameters, built from full tensors as Megatron's modules keep them."""

    def __init__(self, architecture, cut, *, transformer_engine):
        self.architecture, self.cut, self.transformer_engine = architecture, cut, transformer_engine
        self.hf = index_valued(architecture)

    def tensors(self):
        a = self.architecture
        found = {
            "embedding.word_embeddings.weight": self.vocabulary("model.embed_tokens.weight"),
            "decoder.final_layernorm.weight": self.hf["model.norm.weight"],
        }
        if not a.tied_embeddings:
            found["output_layer.weight"] = self.vocabulary("lm_head.weight")
        for number in range(a.num_layers):
            theirs = f"model.layers.{number}."
            sparse = a.experts and number >= a.experts.first_dense_layers
            layer = self.latent(theirs) if a.latent else self.attention(theirs)
            layer |= self.mixture(theirs) if sparse else self.dense(theirs)
            layer["self_attention.linear_proj.weight"] = self.rows_in(theirs + "self_attn.o_proj.weight")
            found |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in layer.items()}
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def part(self, tensor, dim=0):
        return tensor.chunk(self.cut.tp_size, dim=dim)[self.cut.tp_rank]

    def rows_in(self, name):
        return self.part(self.hf[name], dim=1)

    def vocabulary(self, name):
        vocabulary, step = self.hf[name], 3 * self.cut.tp_size
        rows = -(-len(vocabulary) // step) * step
        padding = torch.full((rows - len(vocabulary), vocabulary.shape[1]), PADDING)
        return self.part(torch.cat([vocabulary, padding]))

    def gate_up(self, prefix, part, names=("gate_proj", "up_proj")):
        return torch.cat([part(self.hf[f"{prefix}{name}.weight"]) for name in names])

    def attention(self, prefix):
        a = self.architecture
        norm = "self_attention.linear_qkv.layer_norm_weight" if self.transformer_engine else "input_layernorm.weight"
        layer = {norm: self.hf[prefix + "input_layernorm.weight"]}
        for suffix in ("weight", "bias") if a.qkv_bias else ("weight",):
            q, k, v = (self.hf[f"{prefix}self_attn.{x}_proj.{suffix}"].split(a.head_dim) for x in "qkv")
            per_group = a.num_attention_heads // a.num_key_value_heads
            blocks = []
            for group in range(a.num_key_value_heads):
                blocks += [*q[group * per_group : (group + 1) * per_group], k[group], v[group]]
            layer[f"self_attention.linear_qkv.{suffix}"] = self.part(torch.cat(blocks))
        if a.qk_norm:
            for x in "qk":
                layer[f"self_attention.{x}_layernorm.weight"] = self.hf[f"{prefix}self_attn.{x}_norm.weight"]
        return layer

    def latent(self, prefix):
        layer = {"input_layernorm.weight": self.hf[prefix + "input_layernorm.weight"]}
        prefix += "self_attn."

        def norm(x):
            name = f"linear_{x}_up_proj.layer_norm_weight" if self.transformer_engine else f"{x}_layernorm.weight"
            return f"self_attention.{name}"

        if self.architecture.latent.q_lora_rank is None:
            layer["self_attention.linear_q_proj.weight"] = self.part(self.hf[prefix + "q_proj.weight"])
        else:
            layer["self_attention.linear_q_down_proj.weight"] = self.hf[prefix + "q_a_proj.weight"]
            layer[norm("q")] = self.hf[prefix + "q_a_layernorm.weight"]
            layer["self_attention.linear_q_up_proj.weight"] = self.part(self.hf[prefix + "q_b_proj.weight"])
        layer["self_attention.linear_kv_down_proj.weight"] = self.hf[prefix + "kv_a_proj_with_mqa.weight"]
        layer[norm("kv")] = self.hf[prefix + "kv_a_layernorm.weight"]
        layer["self_attention.linear_kv_up_proj.weight"] = self.part(self.hf[prefix + "kv_b_proj.weight"])
        return layer

    def dense(self, prefix):
        norm = "mlp.linear_fc1.layer_norm_weight" if self.transformer_engine else "pre_mlp_layernorm.weight"
        return {
            norm: self.hf[prefix + "post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": self.gate_up(prefix + "mlp.", self.part),
            "mlp.linear_fc2.weight": self.rows_in(prefix + "mlp.down_proj.weight"),
        }

    def mixture(self, prefix):
        a, cut = self.architecture, self.cut
        block = prefix + ("block_sparse_moe." if a.family == "mixtral" else "mlp.")
        shared = "shared_experts" if a.family.startswith("deepseek") else "shared_expert"
        gate, up, down = PROJECTIONS.get(a.family, ("gate_proj", "up_proj", "down_proj"))
        layer = {
            "pre_mlp_layernorm.weight": self.hf[prefix + "post_attention_layernorm.weight"],
            "mlp.router.weight": self.hf[block + "gate.weight"],
        }
        if a.experts.router_bias:
            layer["mlp.router.expert_bias"] = self.hf[block + "gate.e_score_correction_bias"]
        if a.experts.shared_ffn_hidden_size:
            layer["mlp.shared_experts.linear_fc1.weight"] = self.gate_up(f"{block}{shared}.", self.part)
            layer["mlp.shared_experts.linear_fc2.weight"] = self.rows_in(f"{block}{shared}.down_proj.weight")
        if a.experts.shared_gate:
            layer["mlp.shared_experts.gate_weight"] = self.hf[f"{block}{shared}_gate.weight"]
        mine = torch.arange(a.experts.num_experts).chunk(cut.ep_size)[cut.ep_rank].tolist()
        for local, number in enumerate(mine):
            expert = f"{block}experts.{number}."
            first = self.gate_up(expert, lambda tensor: tensor.chunk(cut.etp_size)[cut.etp_rank], (gate, up))
            second = self.hf[f"{expert}{down}.weight"].chunk(cut.etp_size, dim=1)[cut.etp_rank]
            for matrix, tensor in (("linear_fc1", first), ("linear_fc2", second)):
                if self.transformer_engine:
                    layer[f"mlp.experts.{matrix}.weight{local}"] = tensor
                else:
                    layer[f"mlp.experts.local_experts.{local}.{matrix}.weight"] = tensor
        return layer


@st.composite
def dense_cases(draw):
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
    return architecture, Grid(num_ranks=tp_size, tp=tp_size)


@st.composite
def expert_cases(draw):
    tp, ep, etp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    family = draw(st.sampled_from(["mixtral", "qwen2_moe", "deepseek_v2"]))
    experts = replace(
        EXPERTS,
        num_experts=ep * draw(st.integers(1, 3)),
        ffn_hidden_size=etp * draw(st.integers(1, 3)),
        first_dense_layers=draw(st.integers(0, 2)),
        shared_ffn_hidden_size=0 if family == "mixtral" else tp * draw(st.integers(0, 2)),
        shared_gate=family == "qwen2_moe" and draw(st.booleans()),
        router_bias=draw(st.booleans()),
    )
    latent = replace(LATENT, q_lora_rank=draw(st.sampled_from([None, 5]))) if family == "deepseek_v2" else None
    architecture = replace(
        BASE,
        family=family,
        num_key_value_heads=4 if latent else 2,
        head_dim=3 if latent else 2,
        qkv_bias=not latent,
        qk_norm=not latent,
        experts=experts,
        latent=latent,
    )
    return architecture, Grid(num_ranks=math.lcm(tp, ep * etp), tp=tp, ep=ep, etp=etp)


def cut(architecture, name, tensor, part):
    return pieces(architecture, name, tuple(tensor.shape), param="local", dtype=tensor.dtype, cut=part)


def check_every_rank(architecture, grid, *, transformer_engine):
    """Every piece is its box, all of them are the tensor, and the tensors are those that are announced."""
    for rank in range(grid.num_ranks):
        part = grid.cut(rank)
        megatron = Megatron(architecture, part, transformer_engine=transformer_engine)
        tensors = megatron.tensors()
        for name, local in tensors.items():
            uncovered = local.clone()
            for piece in cut(architecture, name, local, part):
                box = tuple(slice(low, high) for low, high in zip(piece.box.lo, piece.box.hi, strict=True))
                assert torch.equal(piece.view(local), megatron.hf[piece.name][box]), (name, rank, piece)
                piece.view(uncovered).fill_(PADDING)
            assert (uncovered == PADDING).all(), (name, rank)
        [announced] = parameter_shapes(
            architecture,
            grid,
            rank,
            grouped_experts=transformer_engine,
            fused_norms=transformer_engine,
            vocab_multiple=3,
        )
        assert announced == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@given(dense_cases(), st.booleans())
def test_dense_parameters_are_their_boxes(case, transformer_engine):
    check_every_rank(*case, transformer_engine=transformer_engine)


@given(expert_cases(), st.booleans())
def test_experts_and_latent_attention_are_their_boxes(case, transformer_engine):
    check_every_rank(*case, transformer_engine=transformer_engine)


def test_a_rank_counts_its_own_experts():
    """4 experts in 2 blocks, each cut in 2: the second expert of block 1 is the third of the checkpoint's."""
    architecture = replace(BASE, family="mixtral", experts=EXPERTS)
    part = Cut(ep_rank=1, ep_size=2, etp_rank=1, etp_size=2)
    prefix = "model.layers.1.block_sparse_moe.experts.3."
    for name in ("local_experts.1.linear_fc1.weight", "linear_fc1.weight1"):
        found = cut(architecture, f"decoder.layers.1.mlp.experts.{name}", torch.empty(4, 6), part)
        assert [(piece.name, str(piece.box), piece.offset) for piece in found] == [
            (prefix + "w1.weight", "[2:4, 0:6]", 0),
            (prefix + "w3.weight", "[2:4, 0:6]", 12),
        ]


@pytest.mark.parametrize(("rows", "box"), [(6, "[0:6, 0:6]"), (3, "[3:6, 0:6]")])
def test_shape_shows_whether_down_projection_is_split(rows, box):
    architecture = replace(BASE, family="deepseek_v2", latent=LATENT, head_dim=3, num_key_value_heads=4)
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    [piece] = cut(architecture, name, torch.empty(rows, 6), Cut(tp_rank=1, tp_size=2))
    assert str(piece.box) == box


def test_more_ranks_than_groups_cut_a_group_apart():
    """2 groups of [2 query heads; k; v] x 2 rows are 16 fused rows: rank 3 of 4 holds k and v of group 1."""
    found = pieces(
        BASE,
        "decoder.layers.1.self_attention.linear_qkv.weight",
        (4, 6),
        param="qkv",
        dtype=torch.float32,
        cut=Cut(tp_rank=3, tp_size=4),
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
def test_parameter_unlike_its_table_entry_is_refused(name, shape, message):
    with pytest.raises(ValueError, match=message):
        pieces(BASE, name, shape, param="local", dtype=torch.float32, cut=Cut(tp_size=2))
