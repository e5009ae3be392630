"""Layouts of a model as a trainer and an engine hold it, index-valued tensors, and plain slicing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.architecture import Architecture, hf_shapes
from megarl.models.engine import engine_layout
from megarl.models.grid import Grid
from megarl.models.trainer import trainer_layout
from megarl.reshard.layout import Box, Layout


@dataclass(frozen=True)
class TensorDestination:
    """A destination with ready local tensors."""

    pieces: Layout
    tensors: Mapping[str, Tensor]

    def layout(self) -> Layout:
        """Return the pieces."""
        return self.pieces

    def open(self, param: str) -> Tensor:
        """Return the tensor itself."""
        return self.tensors[param]

    def close(self, param: str) -> None:
        """Do nothing."""


def architecture(**sizes) -> Architecture:
    """Return a Qwen3-like architecture with the given sizes."""
    return Architecture(
        **{
            "family": "qwen3",
            "num_layers": 3,
            "hidden_size": 8,
            "ffn_hidden_size": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "vocab_size": 121,
            "tied_embeddings": False,
            "qkv_bias": True,
            "qk_norm": True,
            "norm_eps": 1e-6,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "max_position_embeddings": 64,
        }
        | sizes
    )


def index_valued(model: Architecture) -> dict[str, torch.Tensor]:
    """Return a checkpoint whose elements count up (exact in float32), modulo 251 (exact in bfloat16)."""
    tensors, first = {}, 0
    for name, shape in hf_shapes(model).items():
        tensors[name] = (torch.arange(first, first := first + math.prod(shape)) % 251).float().view(shape)
    return tensors


def trainer_layouts(
    model: Architecture, *, tp: int, pp: int, dp: int = 1, dtype: torch.dtype = torch.float32, **grid: int
) -> list[Layout]:
    """Return the layout of each rank of a trainer; the first stage has the layers that do not divide."""
    first = model.num_layers - model.num_layers // pp * (pp - 1)
    ranks = Grid(num_ranks=tp * dp * pp, tp=tp, pp=pp, num_layers_in_first_stage=first, **grid)
    return [trainer_layout(model, ranks, rank, dtype=dtype, vocab_multiple=5) for rank in range(ranks.num_ranks)]


def engine_layouts(
    model: Architecture,
    *,
    tp: int,
    replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    expert_parallel: bool = False,
) -> list[Layout]:
    """Return the layout of each rank of `replicas` engines."""
    return [
        engine_layout(
            model,
            tp_rank=rank % tp,
            tp_size=tp,
            expert_parallel=expert_parallel,
            dtype=dtype,
            latent_fused=True,
        )
        for rank in range(tp * replicas)
    ]


def blank(layout: Layout, value: float = math.nan) -> dict[str, torch.Tensor]:
    """Return flat local tensors for a layout, filled with `value`."""
    sizes: dict[str, int] = {}
    dtypes = {}
    for piece in layout:
        end = 1 + piece.offset + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.stride, strict=True))
        sizes[piece.param] = max(sizes.get(piece.param, 0), end)
        dtypes[piece.param] = piece.dtype
    return {param: torch.full((size,), value, dtype=dtypes[param]) for param, size in sizes.items()}


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index."""
    return tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))


def filled(layout: Layout, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the local tensors of a layout: slices of the full checkpoint."""
    tensors = blank(layout)
    for piece in layout:
        piece.view(tensors[piece.param]).copy_(checkpoint[piece.name][slices(piece.box)])
    return tensors
