"""How each Megatron parameter is cut out of the Hugging Face ones, as one table.

A row says which Hugging Face parameters a Megatron parameter is made of and by which rule. A rule knows only sizes and
coordinates: the attributes that Megatron and Transformer Engine leave on tensors are not trusted, because they are
absent on some sharded parameters and wrong on others.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from megarl.models.architecture import Architecture, hf_shapes
from megarl.reshard.layout import Box, Piece, row_major, whole


@dataclass(frozen=True)
class Shard:
    """One of the `tp_size` tensor-parallel shards of a Megatron parameter."""

    architecture: Architecture
    prefix: str  # of the layer's Hugging Face names, empty outside the layers
    shape: tuple[int, ...]  # of the local tensor
    tp_rank: int
    tp_size: int

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a Hugging Face parameter of this layer."""
        shapes = hf_shapes(self.architecture)
        if (full := self.prefix + name) not in shapes:
            raise ValueError(f"a {self.architecture.family} checkpoint of these sizes has no parameter {full}")
        return shapes[full]

    def slice_of(self, extent: int) -> tuple[int, int]:
        """First index and end of this shard's part of a dimension that is cut evenly."""
        size = extent // self.tp_size
        return self.tp_rank * size, (self.tp_rank + 1) * size


@dataclass(frozen=True)
class Region:
    """`box` of the Hugging Face parameter `name` lies in the local tensor from row `row` on."""

    name: str  # relative to the layer
    box: Box
    row: int


class Rule(Protocol):
    """One way to cut."""

    padded: ClassVar[bool]  # whether local rows may be left without a region

    def regions(self, shard: Shard) -> Iterator[Region]:
        """What the shard holds."""
        ...


def _rows(full_shape: tuple[int, ...], first: int, end: int) -> Box:
    """Rows `first .. end` of a parameter, whole in the other dimensions."""
    rest = full_shape[1:]
    return Box((first, *(0 for _ in rest)), (end, *rest))


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole parameter."""

    padded: ClassVar[bool] = False
    name: str

    def regions(self, shard: Shard) -> Iterator[Region]:
        """One region, the same on every rank."""
        yield Region(self.name, whole(shard.full_shape(self.name)), 0)


@dataclass(frozen=True)
class RowParallel:
    """Rank `t` holds the `t`-th slice of the columns."""

    padded: ClassVar[bool] = False
    name: str

    def regions(self, shard: Shard) -> Iterator[Region]:
        """One region, cut in columns."""
        rows, columns = shard.full_shape(self.name)
        first, end = shard.slice_of(columns)
        yield Region(self.name, Box((0, first), (rows, end)), 0)


@dataclass(frozen=True)
class GatedMLP:
    """Rank `t` holds `[gate_t ; up_t]`, the `t`-th slices of the rows of both."""

    padded: ClassVar[bool] = False
    gate: str
    up: str

    def regions(self, shard: Shard) -> Iterator[Region]:
        """Gate above up."""
        full_shape = shard.full_shape(self.gate)
        first, end = shard.slice_of(full_shape[0])
        yield Region(self.gate, _rows(full_shape, first, end), 0)
        yield Region(self.up, _rows(full_shape, first, end), end - first)


@dataclass(frozen=True)
class FusedQKV:
    """Rank `t` holds the `t`-th slice of the rows of all key/value groups, each `[its query heads ; key ; value]`.

    A slice may end anywhere, even inside a head: with more ranks than groups Megatron cuts groups apart.
    """

    padded: ClassVar[bool] = False
    suffix: str  # `weight` or `bias`

    def regions(self, shard: Shard) -> Iterator[Region]:
        """One region per projection and group that the slice meets, in local order."""
        sizes = shard.architecture
        num_groups, key = sizes.num_key_value_heads, sizes.head_dim
        query = sizes.num_attention_heads // num_groups * key
        first, end = shard.slice_of(num_groups * (query + 2 * key))
        begin = 0  # the fused row where the projection of the group begins
        for group in range(num_groups):
            for projection, rows in (("q", query), ("k", key), ("v", key)):
                low, high = max(first, begin), min(end, begin + rows)
                if low < high:
                    name = f"self_attn.{projection}_proj.{self.suffix}"
                    to_row = group * rows - begin
                    box = _rows(shard.full_shape(name), low + to_row, high + to_row)
                    yield Region(name, box, low - first)
                begin += rows


@dataclass(frozen=True)
class Vocabulary:
    """Rank `t` holds the `t`-th slice of the rows, padding at the end included, which no region covers."""

    padded: ClassVar[bool] = True
    name: str
    tied_name: str

    def regions(self, shard: Shard) -> Iterator[Region]:
        """One region, or none where all local rows are padding."""
        name = self.tied_name if shard.architecture.tied_embeddings else self.name
        full_shape = shard.full_shape(name)
        padded_rows = shard.shape[0] * shard.tp_size
        if padded_rows < full_shape[0]:
            raise ValueError(f"{padded_rows} rows on {shard.tp_size} ranks cannot hold {full_shape[0]} rows of {name}")
        first, end = shard.slice_of(padded_rows)
        if first < full_shape[0]:
            yield Region(name, _rows(full_shape, first, min(end, full_shape[0])), 0)


MODEL: Mapping[str, Rule] = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    # A tied model cut into pipeline stages keeps a second copy of the embedding on its last stage.
    "output_layer.weight": Vocabulary("lm_head.weight", "model.embed_tokens.weight"),
}

# Transformer Engine fuses a norm into the linear layer behind it, so the norms have two names.
LAYER: Mapping[str, Rule] = {
    "input_layernorm.weight": Replicated("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": Replicated("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": FusedQKV("weight"),
    "self_attention.linear_qkv.bias": FusedQKV("bias"),
    "self_attention.q_layernorm.weight": Replicated("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Replicated("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": RowParallel("self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": Replicated("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": Replicated("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": GatedMLP("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": RowParallel("mlp.down_proj.weight"),
}

LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def pieces(
    architecture: Architecture,
    name: str,
    shape: tuple[int, ...],
    *,
    param: str,
    dtype: torch.dtype,
    tp_rank: int,
    tp_size: int,
) -> list[Piece]:
    """Which boxes of which Hugging Face parameters one local, contiguous Megatron parameter holds.

    Args:
        architecture: the sizes of the model.
        name: Megatron's name with the layer's global number, as in `decoder.layers.7.mlp.linear_fc1.weight`.
        shape: of the local tensor.
        param: the key under which the caller keeps the local tensor.
        dtype: of the local tensor.
        tp_rank: place of this shard among the tensor-parallel ones.
        tp_size: number of tensor-parallel shards.

    Raises:
        ValueError: the table has no such parameter, or the shape is not that of such a shard.
    """
    layer = LAYER_NAME.fullmatch(name)
    rule = LAYER.get(layer[2]) if layer else MODEL.get(name)
    if rule is None:
        raise ValueError(f"Megatron parameter {name} has no rule in megarl.models.weights")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    regions = list(rule.regions(Shard(architecture, prefix, shape, tp_rank, tp_size)))
    full = rule.padded or sum(region.box.numel for region in regions) == math.prod(shape)
    if not full or any(region.box.shape[1:] != shape[1:] for region in regions):
        held = ", ".join(f"{region.name} {region.box}" for region in regions)
        raise ValueError(f"{name}: shape {shape} on rank {tp_rank} of {tp_size} does not fit what it must hold: {held}")
    strides = row_major(shape)
    return [
        Piece(prefix + region.name, region.box, param, region.row * strides[0], strides, dtype) for region in regions
    ]
