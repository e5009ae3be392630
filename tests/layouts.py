"""Layouts of a dense model as a trainer and an engine hold it, index-valued tensors, and plain slicing."""

import math

import torch

from megarl.models.architecture import Architecture, hf_shapes
from megarl.models.weights import pieces
from megarl.reshard.layout import Box, Layout, Piece, row_major


def architecture(**sizes) -> Architecture:
    """A Qwen3-like architecture with the given sizes."""
    return Architecture(
        **{
            "family": "qwen3",
            "num_layers": 3,
            "hidden_size": 8,
            "ffn_hidden_size": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "vocab_size": 21,
            "tied_embeddings": False,
            "qkv_bias": True,
            "qk_norm": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "max_position_embeddings": 64,
        }
        | sizes
    )


def index_valued(model: Architecture) -> dict[str, torch.Tensor]:
    """The checkpoint whose every element is its own number (exact in float32), modulo 251 (exact in bfloat16)."""
    tensors, first = {}, 0
    for name, shape in hf_shapes(model).items():
        tensors[name] = (torch.arange(first, first := first + math.prod(shape)) % 251).float().view(shape)
    return tensors


def trainer_shapes(model: Architecture, *, tp: int, pp: int, stage: int) -> dict[str, tuple[int, ...]]:
    """Megatron's local parameters of one pipeline stage, by name with the global layer number."""
    hidden, head = model.hidden_size, model.head_dim
    fused = (model.num_attention_heads + 2 * model.num_key_value_heads) * head // tp
    vocabulary = (-(-model.vocab_size // tp) + 1, hidden)
    shapes: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        shapes["embedding.word_embeddings.weight"] = vocabulary
    for number in range(model.num_layers * stage // pp, model.num_layers * (stage + 1) // pp):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attention.linear_qkv.weight": (fused, hidden),
            "self_attention.linear_qkv.bias": (fused,),
            "self_attention.q_layernorm.weight": (head,),
            "self_attention.k_layernorm.weight": (head,),
            "self_attention.linear_proj.weight": (hidden, model.num_attention_heads * head // tp),
            "pre_mlp_layernorm.weight": (hidden,),
            "mlp.linear_fc1.weight": (2 * model.ffn_hidden_size // tp, hidden),
            "mlp.linear_fc2.weight": (hidden, model.ffn_hidden_size // tp),
        }
        absent = () if model.qkv_bias else ("linear_qkv.bias",)
        absent += () if model.qk_norm else ("q_layernorm.weight", "k_layernorm.weight")
        shapes |= {
            f"decoder.layers.{number}.{name}": shape for name, shape in layer.items() if not name.endswith(absent)
        }
    if stage == pp - 1:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        if pp > 1 or not model.tied_embeddings:
            shapes["output_layer.weight"] = vocabulary
    return shapes


def trainer_layouts(
    model: Architecture, *, tp: int, pp: int, dp: int = 1, dtype: torch.dtype = torch.float32
) -> list[Layout]:
    """What each rank of a trainer holds; ranks count tensor-parallel first, then data-parallel, then stages."""
    layouts = []
    for rank in range(tp * dp * pp):
        stage = rank // (tp * dp)
        layout: list[Piece] = []
        for name, shape in trainer_shapes(model, tp=tp, pp=pp, stage=stage).items():
            layout += pieces(model, name, shape, param=name, dtype=dtype, tp_rank=rank % tp, tp_size=tp)
        layouts.append(layout)
    return layouts


def engine_layouts(
    model: Architecture, *, tp: int, replicas: int = 1, dtype: torch.dtype = torch.float32
) -> list[Layout]:
    """What each rank of an engine needs: `[Q;K;V]` with replicated key/value heads, `[gate;up]`, padded vocabulary."""
    return [_engine_layout(model, rank % tp, tp, dtype) for rank in range(tp * replicas)]


def _engine_layout(model: Architecture, rank: int, tp: int, dtype: torch.dtype) -> Layout:
    layout: list[Piece] = []
    kv_ranks = min(tp, model.num_key_value_heads)  # the others repeat a neighbour's heads

    def place(param: str, parts: list[tuple[str, Box]]) -> None:
        row = 0
        for name, box in parts:
            strides = row_major(box.shape)
            layout.append(Piece(name, box, param, row * strides[0], strides, dtype))
            row += box.shape[0]

    def rows(name: str, part: int, num_parts: int) -> tuple[str, Box]:
        total, *rest = shapes[name]
        size = -(-total // num_parts)
        return name, Box((part * size, *(0 for _ in rest)), (min(total, (part + 1) * size), *rest))

    shapes = hf_shapes(model)
    for name, shape in shapes.items():
        prefix, _, kind = name.partition("self_attn.")
        suffix = name.rpartition(".")[2]
        if kind.startswith("q_proj"):
            keys = [f"{prefix}self_attn.{x}_proj.{suffix}" for x in "kv"]
            kv = [rows(key, rank * kv_ranks // tp, kv_ranks) for key in keys]
            place(f"{prefix}self_attn.qkv_proj.{suffix}", [rows(name, rank, tp), *kv])
        elif kind.startswith(("k_proj", "v_proj")) or name.endswith("up_proj.weight"):
            pass  # placed with the first of their fused parameter
        elif name.endswith("gate_proj.weight"):
            up = name.replace("gate_proj", "up_proj")
            place(name.replace("gate_proj", "gate_up_proj"), [rows(name, rank, tp), rows(up, rank, tp)])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            width = shape[1] // tp
            place(name, [(name, Box((0, rank * width), (shape[0], (rank + 1) * width)))])
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            part = rows(name, rank, tp)
            if part[1].numel > 0 and part[1].lo[0] < part[1].hi[0]:
                place(name, [part])
        else:
            place(name, [rows(name, 0, 1)])
    return layout


def blank(layout: Layout, value: float = math.nan) -> dict[str, torch.Tensor]:
    """Flat local tensors large enough for a layout, filled with `value`."""
    sizes: dict[str, int] = {}
    dtypes = {}
    for piece in layout:
        end = 1 + piece.offset + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.stride, strict=True))
        sizes[piece.param] = max(sizes.get(piece.param, 0), end)
        dtypes[piece.param] = piece.dtype
    return {param: torch.full((size,), value, dtype=dtypes[param]) for param, size in sizes.items()}


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))


def filled(layout: Layout, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The local tensors of a layout: plain slices of the full checkpoint."""
    tensors = blank(layout)
    for piece in layout:
        piece.view(tensors[piece.param]).copy_(checkpoint[piece.name][slices(piece.box)])
    return tensors
