"""The parameters of every rank of a Megatron run, from sizes alone: shapes, layouts, and the placement of all ranks.

Nothing here looks at a real model; tests prove that real models agree.
"""

import itertools

import torch

from megarl.models.architecture import (
    Architecture,
    LatentAttention,
    LayerKind,
    Shapes,
    hf_shapes,
    norm_shapes,
    projection_shapes,
)
from megarl.models.experts import Experts
from megarl.models.families import OUTPUT_NORMS
from megarl.models.grid import Cut, Grid
from megarl.models.linear import LinearAttention
from megarl.models.placing import behind, placed
from megarl.models.weights import pieces
from megarl.reshard.layout import Layout, Piece, Placement, placement_of

VOCAB_MULTIPLE = 64  # a rank's rows of the embedding are a multiple of this
EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm."
OUTPUT = "output_layer.weight"
ROUTER_BIAS = "router.expert_bias"  # in float32 in Megatron, whatever the type of the parameters


def parameter_shapes(
    architecture: Architecture,
    grid: Grid,
    rank: int,
    *,
    grouped_experts: bool = False,
    fused_norms: bool = False,
    vocab_multiple: int = VOCAB_MULTIPLE,
) -> list[Shapes]:
    """Return the local shapes of Megatron's parameters on a rank, one dict per model chunk.

    Names have the layer's global number. The router's bias is included although it is a buffer in Megatron.

    Args:
        architecture: the sizes of the model.
        grid: the layout of the ranks.
        rank: the rank that holds the parameters.
        grouped_experts: Transformer Engine's grouped experts instead of one module per expert.
        fused_norms: Transformer Engine's names, which fuse a norm into the linear layer behind it.
        vocab_multiple: the padded vocabulary is a multiple of this on every rank.
    """
    stage = grid.stage(rank)
    cut = grid.cut(rank)
    vocabulary = _vocabulary(architecture, grid.tp, vocab_multiple)
    of_kind = {
        kind: _layer(architecture, cut, kind, grouped_experts=grouped_experts, fused_norms=fused_norms)
        for kind in architecture.layer_of_kind
    }
    chunks: list[Shapes] = []
    for layers in grid.layers(stage, architecture.num_layers):
        chunk: Shapes = {EMBEDDING: vocabulary} if stage == 0 and not chunks else {}
        for number in layers:
            chunk |= _named(number, of_kind[architecture.kind(number)])
        chunks.append(chunk)
    if stage == grid.pp - 1:
        chunks[-1] |= norm_shapes(architecture, FINAL_NORM)
        if not architecture.tied_embeddings or grid.pp > 1:
            chunks[-1][OUTPUT] = _output(architecture, vocabulary)
    return chunks


def padded_vocab_size(vocab_size: int, tp_size: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Return the rows of the embedding: the vocabulary, rounded up so that every rank has a multiple of some rows."""
    step = multiple * tp_size
    return -(-vocab_size // step) * step


def _vocabulary(a: Architecture, tp_size: int, multiple: int) -> tuple[int, int]:
    return padded_vocab_size(a.vocab_size, tp_size, multiple) // tp_size, a.hidden_size


def _output(a: Architecture, vocabulary: tuple[int, int]) -> tuple[int, int]:
    return (1, a.hidden_size) if a.scalar_head else vocabulary


def _attention(a: Architecture, cut: Cut, kind: LayerKind, *, fused_norms: bool) -> Shapes:
    if a.linear and kind.attention == "linear":
        return {"input_layernorm.weight": (a.hidden_size,)} | _linear_attention(a, a.linear, cut)
    if a.latent:
        return {"input_layernorm.weight": (a.hidden_size,)} | _latent(a, a.latent, cut, fused_norms=fused_norms)
    of_query = 1 + a.traits.gated_attention
    rows = (of_query * a.num_attention_heads + 2 * a.num_key_value_heads) * a.head_dim // cut.tp_size
    shapes: Shapes = {}
    if a.traits.input_norms:
        shapes = norm_shapes(a, "self_attention.linear_qkv.layer_norm_" if fused_norms else "input_layernorm.")
    shapes["self_attention.linear_qkv.weight"] = (rows, a.hidden_size)
    if a.qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (rows,)
    if a.qk_norm:
        parts = cut.tp_size if a.traits.wide_qk_norm else 1
        sizes = zip("qk", a.qk_norm_sizes, strict=True)
        module = "self_attention.core_attention" if a.traits.late_qk_norm else "self_attention"
        shapes |= {f"{module}.{x}_layernorm.weight": (size // parts,) for x, size in sizes}
    if a.traits.sinks:
        shapes["self_attention.core_attention.softmax_offset"] = (a.num_attention_heads // cut.tp_size,)
    columns = a.num_attention_heads * a.head_dim // cut.tp_size
    return shapes | projection_shapes(a, "self_attention.linear_proj", a.hidden_size, columns)


def _latent(a: Architecture, latent: LatentAttention, cut: Cut, *, fused_norms: bool) -> Shapes:
    heads = a.num_attention_heads // cut.tp_size
    norm = "linear_{}_up_proj.layer_norm_weight" if fused_norms else "{}_layernorm.weight"
    if latent.q_lora_rank is None:
        shapes: Shapes = {"linear_q_proj.weight": (heads * a.head_dim, a.hidden_size)}
    else:
        shapes = {
            "linear_q_down_proj.weight": (latent.q_lora_rank, a.hidden_size),
            norm.format("q"): (latent.q_lora_rank,),
            "linear_q_up_proj.weight": (heads * a.head_dim, latent.q_lora_rank),
        }
    shapes |= {
        "linear_kv_down_proj.weight": (latent.kv_lora_rank + latent.qk_rope_head_dim, a.hidden_size),
        norm.format("kv"): (latent.kv_lora_rank,),
        "linear_kv_up_proj.weight": (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank),
        "linear_proj.weight": (a.hidden_size, heads * latent.v_head_dim),
    }
    return {f"self_attention.{name}": shape for name, shape in shapes.items()}


def _linear_attention(a: Architecture, linear: LinearAttention, cut: Cut) -> Shapes:
    heads = linear.num_value_heads // cut.tp_size
    shapes: Shapes = {
        "in_proj.weight": (linear.size("qkvzba") // cut.tp_size, a.hidden_size),
        "conv_weight": (linear.size("qkv") // cut.tp_size, 1, linear.conv_width),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "out_norm.weight": (linear.value_dim,),
        "out_proj.weight": (a.hidden_size, linear.value_size // cut.tp_size),
    }
    return {f"self_attention.{name}": shape for name, shape in shapes.items()}


def _layer(
    a: Architecture, cut: Cut, kind: LayerKind, *, grouped_experts: bool = False, fused_norms: bool = False
) -> Shapes:
    """Return a layer, by name after the layer's prefix."""
    attention = _attention(a, cut, kind, fused_norms=fused_norms)
    experts = a.experts
    if not kind.is_sparse or experts is None:
        if a.traits.input_norms:
            attention |= norm_shapes(a, "mlp.linear_fc1.layer_norm_" if fused_norms else "pre_mlp_layernorm.")
        for norm in OUTPUT_NORMS if a.traits.output_norms else ():
            attention |= norm_shapes(a, f"{norm}.")
        return attention | _feed_forward(a, a.ffn_hidden_size // cut.tp_size)
    shapes: Shapes = {
        "pre_mlp_layernorm.weight": (a.hidden_size,),
        **projection_shapes(a, "mlp.router", experts.num_experts, a.hidden_size),
    }
    if experts.router_bias:
        shapes[f"mlp.{ROUTER_BIAS}"] = (experts.num_experts,)
    shared = experts.shared_ffn_hidden_size
    if shared:
        shapes |= _swiglu("mlp.shared_experts.linear_fc{}.weight", a, shared // cut.tp_size)
    if experts.shared_gate:
        shapes["mlp.shared_experts.gate_weight"] = (1, a.hidden_size)
    return attention | shapes | _experts(a, experts, cut, grouped=grouped_experts)


def _feed_forward(a: Architecture, ffn: int) -> Shapes:
    if a.traits.gated:
        return _swiglu("mlp.linear_fc{}.weight", a, ffn)
    up = projection_shapes(a, "mlp.linear_fc1", ffn, a.hidden_size)
    return up | projection_shapes(a, "mlp.linear_fc2", a.hidden_size, ffn)


def _experts(a: Architecture, experts: Experts, cut: Cut, *, grouped: bool) -> Shapes:
    shapes: Shapes = {}
    for local in range(experts.num_experts // cut.ep_size):
        name = f"linear_fc{{}}.{{}}{local}" if grouped else f"local_experts.{local}.linear_fc{{}}.{{}}"
        ffn = experts.ffn_hidden_size // cut.etp_size
        whole = {"weight": ((2 * ffn, a.hidden_size), (a.hidden_size, ffn)), "bias": ((2 * ffn,), (a.hidden_size,))}
        for part in a.traits.linear_parts:
            shapes |= {f"mlp.experts.{name.format(place, part)}": shape for place, shape in enumerate(whole[part], 1)}
    return shapes


def _named(number: int, layer: Shapes) -> Shapes:
    return {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}


def _swiglu(name: str, a: Architecture, ffn: int) -> Shapes:
    return {name.format(1): (2 * ffn, a.hidden_size), name.format(2): (a.hidden_size, ffn)}


def trainer_layout(
    architecture: Architecture,
    grid: Grid,
    rank: int,
    *,
    dtype: torch.dtype,
    vocab_multiple: int = VOCAB_MULTIPLE,
) -> Layout:
    """Return the layout of a rank of a trainer; `param` is Megatron's name with the layer's global number."""
    chunks = parameter_shapes(architecture, grid, rank, vocab_multiple=vocab_multiple)
    return tuple(piece for chunk in chunks for piece in _layout(architecture, chunk, grid.cut(rank), dtype))


def _layout(architecture: Architecture, shapes: Shapes, cut: Cut, dtype: torch.dtype) -> list[Piece]:
    layout = []
    for name, shape in shapes.items():
        kept = torch.float32 if name.endswith(ROUTER_BIAS) else dtype
        layout += pieces(architecture, name, shape, param=name, dtype=kept, cut=cut)
    return layout


def trainer_placement(architecture: Architecture, grid: Grid, *, dtype: torch.dtype) -> Placement:
    """Return the boxes that each rank of a trainer holds.

    All layers of a kind are cut alike. So boxes are computed for one layer of each kind and for each different cut, and
    the ranks that have them for one such layer of each stage.
    """
    ranks: dict[Cut, list[list[int]]] = {}  # by stage
    for rank in range(grid.num_ranks):
        of_cut = ranks.setdefault(grid.cut(rank), [[] for _ in range(grid.pp)])
        of_cut[grid.stage(rank)].append(rank)
    by_stage = [list(of_stage) for of_stage in zip(*ranks.values(), strict=True)]
    first = by_stage[0]
    last = by_stage[-1]
    if architecture.tied_embeddings and grid.pp > 1:
        first = [[*front, *back] for front, back in zip(first, last, strict=True)]
    vocabulary = _vocabulary(architecture, grid.tp, VOCAB_MULTIPLE)
    at_last = norm_shapes(architecture, FINAL_NORM)
    if not architecture.tied_embeddings:
        at_last[OUTPUT] = _output(architecture, vocabulary)
    embedding: Shapes = {EMBEDDING: vocabulary}
    layers = placement_of([_layout(architecture, _one_of_each_kind(architecture, cut), cut, dtype) for cut in ranks])
    found = placed(placement_of([_layout(architecture, embedding, cut, dtype) for cut in ranks]), first)
    found |= placed(placement_of([_layout(architecture, at_last, cut, dtype) for cut in ranks]), last)
    for stage, of_stage in enumerate(by_stage):
        boxes = placed(layers, of_stage)
        of_kind = {
            kind: behind(architecture.layer_prefix(number), boxes)
            for kind, number in architecture.layer_of_kind.items()
        }
        for number in itertools.chain.from_iterable(grid.layers(stage, architecture.num_layers)):
            prefix = architecture.layer_prefix(number)
            found |= {f"{prefix}{name}": held for name, held in of_kind[architecture.kind(number)].items()}
    return {name: found[name] for name in hf_shapes(architecture)}


def _one_of_each_kind(architecture: Architecture, cut: Cut) -> Shapes:
    """Return the shapes of one layer of each kind."""
    shapes: Shapes = {}
    for kind, number in architecture.layer_of_kind.items():
        shapes |= _named(number, _layer(architecture, cut, kind))
    return shapes
