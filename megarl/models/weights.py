"""The table of rules that cut each Megatron parameter out of Hugging Face parameters.

A row names the Hugging Face parameters that a Megatron parameter consists of, and the rule. A rule knows only sizes and
coordinates. The attributes that Megatron and Transformer Engine leave on tensors are not trusted: they are missing on
some sharded parameters and wrong on others.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import torch

from megarl.models.architecture import SCORE, Architecture, CheckpointPlace, checkpoint_places, llama_shapes
from megarl.models.families import ExpertNames
from megarl.models.grid import Cut
from megarl.models.linear import CONVOLUTION, PREFIX
from megarl.platform.errors import UserError
from megarl.reshard.headers import Shape
from megarl.reshard.layout import Box, Piece, row_major, rows_of


@dataclass(frozen=True)
class Shard:
    """One of the `num_parts` parts into which a Megatron parameter is cut."""

    architecture: Architecture
    prefix: str  # of Llama's names: of the layer or the expert; empty outside the layers
    shape: Shape  # of the local tensor
    part: int
    num_parts: int

    def full_shape(self, name: str) -> Shape:
        """Return the shape of a parameter of this layer, by its name in Llama."""
        shapes = llama_shapes(self.architecture)
        full = self.prefix + name
        if full not in shapes:
            raise UserError(f"a {self.architecture.family} checkpoint of these sizes has no parameter {full}")
        return shapes[full]

    def slice_of(self, extent: int) -> tuple[int, int]:
        """Return the first index and the end of this shard's part of a dimension that is cut evenly."""
        size = extent // self.num_parts
        return self.part * size, (self.part + 1) * size


@dataclass(frozen=True)
class Region:
    """A box of the parameter `name` that begins at row `row` of the local tensor."""

    name: str  # of a rule: as in Llama, without the shard's prefix
    box: Box
    row: int


class CutRule(ABC):
    """One way to cut parameters."""

    padded: ClassVar[bool] = False  # whether local rows may be left without a region

    @abstractmethod
    def regions(self, shard: Shard) -> Iterator[Region]:
        """Yield the regions that the shard holds."""


@dataclass(frozen=True)
class Sliced(CutRule):
    """A parameter that is cut along one dimension (rank `t` holds slice `t`), or that every rank holds complete."""

    name: str
    dimension: int | None  # that is cut; None: none is
    may_be_whole: bool = False  # Transformer Engine replicates it, Megatron's own layer cuts it: only the shape tells

    def regions(self, shard: Shard) -> Iterator[Region]:
        """Yield one region."""
        shape = shard.full_shape(self.name)
        lo = [0] * len(shape)
        hi = list(shape)
        is_whole = self.may_be_whole and shard.shape == shape
        if self.dimension is not None and not is_whole:
            lo[self.dimension], hi[self.dimension] = shard.slice_of(shape[self.dimension])
        yield Region(self.name, Box(tuple(lo), tuple(hi)), 0)


replicated = partial(Sliced, dimension=None)
column_parallel = partial(Sliced, dimension=0)  # a row of a matrix or a bias for each output
row_parallel = partial(Sliced, dimension=1)


@dataclass(frozen=True)
class GatedMLP(CutRule):
    """Two matrices cut in rows: rank `t` holds `[gate_t ; up_t]`, the `t`-th slices of both."""

    gate: str
    up: str

    def regions(self, shard: Shard) -> Iterator[Region]:
        """Yield gate above up."""
        full_shape = shard.full_shape(self.gate)
        first, end = shard.slice_of(full_shape[0])
        yield Region(self.gate, rows_of(full_shape, first, end), 0)
        yield Region(self.up, rows_of(full_shape, first, end), end - first)


@dataclass(frozen=True)
class FusedQKV(CutRule):
    """Key/value groups, each `[its query heads ; their gates ; key ; value]`: rank `t` has a slice of all their rows.

    A slice may end anywhere, even inside a head: with more ranks than groups Megatron divides groups.
    """

    suffix: str  # `weight` or `bias`

    def regions(self, shard: Shard) -> Iterator[Region]:
        """Yield one region per projection and group in the slice, in local order."""
        sizes = shard.architecture
        parts = [part for group in range(sizes.num_key_value_heads) for part in _group(sizes, group)]
        first, end = shard.slice_of(sum(rows for _, _, rows in parts))
        begin = 0  # the fused row where the part begins
        for projection, row, rows in parts:
            low = max(first, begin)
            high = min(end, begin + rows)
            if low < high:
                name = f"self_attn.{projection}_proj.{self.suffix}"
                box = rows_of(shard.full_shape(name), low + row - begin, high + row - begin)
                yield Region(name, box, low - first)
            begin += rows


def _group(sizes: Architecture, group: int) -> Iterator[tuple[str, int, int]]:
    """Yield projection, first row and number of rows of the parts of a key/value group, in Megatron's order."""
    key = sizes.head_dim
    per_group = sizes.num_attention_heads // sizes.num_key_value_heads
    if sizes.traits.gated_attention:
        heads = range(group * per_group, (group + 1) * per_group)
        yield from (("q", (2 * head + is_gate) * key, key) for is_gate in (0, 1) for head in heads)
    else:
        yield "q", group * per_group * key, per_group * key
    yield "k", group * key, key
    yield "v", group * key, key


@dataclass(frozen=True)
class HeadGroups(CutRule):
    """Groups of heads of linear attention: rank `t` holds the `t`-th slice of the groups, each complete.

    `sections` are those of parameters, as in `Family.linear_sections`.
    """

    sections: Mapping[str, tuple[str, ...]]

    def regions(self, shard: Shard) -> Iterator[Region]:
        """Yield one region per group and section, in local order."""
        linear = shard.architecture.linear
        assert linear is not None
        row = 0
        for group in range(*shard.slice_of(linear.num_key_heads)):
            for projection, sections in self.sections.items():
                name = f"{PREFIX}{projection}.weight"
                begin = 0  # of the section
                for kinds in sections:
                    rows = linear.rows(kinds)
                    first = begin + group * rows
                    yield Region(name, rows_of(shard.full_shape(name), first, first + rows), row)
                    begin += linear.size(kinds)
                    row += rows


@dataclass(frozen=True)
class Vocabulary(CutRule):
    """A padded vocabulary cut in rows: rank `t` holds the `t`-th slice. No region covers the padding at the end."""

    padded = True
    name: str
    tied_name: str

    def regions(self, shard: Shard) -> Iterator[Region]:
        """Yield one region, or none if all local rows are padding."""
        name = self.tied_name if shard.architecture.tied_embeddings else self.name
        full_shape = shard.full_shape(name)
        padded_rows = shard.shape[0] * shard.num_parts
        if padded_rows < full_shape[0]:
            raise UserError(f"{padded_rows} rows on {shard.num_parts} ranks cannot hold {full_shape[0]} rows of {name}")
        first, end = shard.slice_of(padded_rows)
        if first < full_shape[0]:
            yield Region(name, rows_of(full_shape, first, min(end, full_shape[0])), 0)


MODEL: Mapping[str, CutRule] = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": replicated("model.norm.weight"),
    "decoder.final_layernorm.bias": replicated("model.norm.bias"),
    # A tied model cut into pipeline stages keeps a second copy of the embedding on its last stage.
    "output_layer.weight": Vocabulary("lm_head.weight", "model.embed_tokens.weight"),
}

SCALAR_HEAD: Mapping[str, CutRule] = {"output_layer.weight": replicated(SCORE)}

# Transformer Engine fuses a norm into the next linear layer, so the norms have two names.
LAYER: Mapping[str, CutRule] = {
    "input_layernorm.weight": replicated("input_layernorm.weight"),
    "input_layernorm.bias": replicated("input_layernorm.bias"),
    "self_attention.linear_qkv.layer_norm_weight": replicated("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_bias": replicated("input_layernorm.bias"),
    "self_attention.linear_proj.weight": row_parallel("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": replicated("self_attn.o_proj.bias"),
    "pre_mlp_layernorm.weight": replicated("post_attention_layernorm.weight"),
    "pre_mlp_layernorm.bias": replicated("post_attention_layernorm.bias"),
    "attention_output_layernorm.weight": replicated("attention_output_layernorm.weight"),
    "feed_forward_output_layernorm.weight": replicated("feed_forward_output_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": replicated("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_bias": replicated("post_attention_layernorm.bias"),
    "mlp.linear_fc2.weight": row_parallel("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": replicated("mlp.down_proj.bias"),
}

GATED: Mapping[str, CutRule] = {"mlp.linear_fc1.weight": GatedMLP("mlp.gate_proj.weight", "mlp.up_proj.weight")}

NOT_GATED: Mapping[str, CutRule] = {
    "mlp.linear_fc1.weight": column_parallel("mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": column_parallel("mlp.up_proj.bias"),
}

WIDE_NORMS: Mapping[str, CutRule] = {
    "self_attention.q_layernorm.weight": column_parallel("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": column_parallel("self_attn.k_norm.weight"),
}

ATTENTION: Mapping[str, CutRule] = {
    "self_attention.linear_qkv.weight": FusedQKV("weight"),
    "self_attention.linear_qkv.bias": FusedQKV("bias"),
    "self_attention.q_layernorm.weight": replicated("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": replicated("self_attn.k_norm.weight"),
    "self_attention.core_attention.softmax_offset": column_parallel("self_attn.sinks"),
    "self_attention.core_attention.q_layernorm.weight": replicated("self_attn.q_norm.weight"),
    "self_attention.core_attention.k_layernorm.weight": replicated("self_attn.k_norm.weight"),
}

# The checkpoint has [query ; key ; value] of each head, in the order of Megatron.
FUSED_ATTENTION: Mapping[str, CutRule] = {
    "self_attention.linear_qkv.weight": column_parallel("self_attn.qkv_proj.weight"),
    "self_attention.linear_qkv.bias": column_parallel("self_attn.qkv_proj.bias"),
}

# The rows of the up-projections are complete heads on both sides: [nope ; rope] of a query, [nope ; value] of a key.
LATENT_ATTENTION: Mapping[str, CutRule] = {
    "self_attention.linear_q_proj.weight": column_parallel("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": column_parallel("self_attn.q_a_proj.weight", may_be_whole=True),
    "self_attention.q_layernorm.weight": replicated("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": replicated("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": column_parallel("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": column_parallel(
        "self_attn.kv_a_proj_with_mqa.weight", may_be_whole=True
    ),
    "self_attention.kv_layernorm.weight": replicated("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": replicated("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": column_parallel("self_attn.kv_b_proj.weight"),
}


LINEAR_ATTENTION: Mapping[str, CutRule] = {
    "self_attention.conv_weight": HeadGroups(CONVOLUTION),
    "self_attention.dt_bias": column_parallel(f"{PREFIX}dt_bias"),
    "self_attention.A_log": column_parallel(f"{PREFIX}A_log"),
    "self_attention.out_norm.weight": replicated(f"{PREFIX}norm.weight"),
    "self_attention.out_proj.weight": row_parallel(f"{PREFIX}out_proj.weight"),
}


@cache
def _sparse_layer(names: ExpertNames) -> Mapping[str, CutRule]:
    """Return the rules of a layer with experts, except for the experts."""
    shared = f"{names.block}.{names.shared}"
    return {
        "mlp.router.weight": replicated(f"{names.block}.gate.weight"),
        "mlp.router.bias": replicated(f"{names.block}.gate.bias"),
        "mlp.router.expert_bias": replicated(f"{names.block}.gate.e_score_correction_bias"),
        "mlp.shared_experts.linear_fc1.weight": GatedMLP(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
        "mlp.shared_experts.linear_fc2.weight": row_parallel(f"{shared}.down_proj.weight"),
        "mlp.shared_experts.gate_weight": replicated(f"{shared}_gate.weight"),
    }


@cache
def _expert(names: ExpertNames) -> Mapping[str, CutRule]:
    """Return the rules of the two matrices of an expert, and of their biases."""
    first: CutRule = GatedMLP(f"{names.gate}.weight", f"{names.up}.weight")
    if names.gate_up:
        first = column_parallel(f"{names.gate_up}.weight")
    return {
        "1.weight": first,
        "1.bias": column_parallel(f"{names.gate_up}.bias"),
        "2.weight": row_parallel(f"{names.down}.weight"),
        "2.bias": replicated(f"{names.down}.bias"),
    }


LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Names of SequentialMLP and of Transformer Engine's grouped experts; both number the experts of the rank.
EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<local>\d+)\.linear_fc(?P<part>[12]\.(weight|bias))"),
    re.compile(r"mlp\.experts\.linear_fc(?P<part>[12]\.(weight|bias))(?P<local>\d+)"),
)


def pieces(
    architecture: Architecture, name: str, shape: Shape, *, param: str, dtype: torch.dtype, cut: Cut
) -> list[Piece]:
    """Return the boxes of Hugging Face parameters in a local, contiguous Megatron parameter.

    Args:
        architecture: the sizes of the model.
        name: Megatron's name with the layer's global number, as in `decoder.layers.7.mlp.linear_fc1.weight`.
        shape: of the local tensor.
        param: the key under which the caller keeps the local tensor.
        dtype: of the local tensor.
        cut: the part of each matrix that the rank holds.

    Raises:
        UserError: the table has no such parameter, or the shape does not fit the shard.
    """
    rule, shard = _find(architecture, name, shape, cut)
    regions = list(rule.regions(shard))
    full = rule.padded or sum(region.box.numel for region in regions) == math.prod(shape)
    if not full or any(region.box.shape[1:] != shape[1:] for region in regions):
        held = ", ".join(f"{region.name} {region.box}" for region in regions)
        where = f"on rank {shard.part} of {shard.num_parts}"
        raise UserError(f"{name}: shape {shape} {where} does not fit what it must hold: {held}")
    strides = row_major(shape)
    places = [_place(shard, region) for region in regions]
    return [
        Piece(place.name, box_at(place, region.box), param, region.row * strides[0], stride_at(place, strides), dtype)
        for place, region in zip(places, regions, strict=True)
    ]


def held_and_whole(
    architecture: Architecture, name: str, shape: Shape, *, cut: Cut
) -> tuple[list[Region], list[Region]]:
    """Return the regions of a local Megatron parameter, and those of the whole parameter, by names of the checkpoint.

    The arguments are those of `pieces`.
    """
    rule, shard = _find(architecture, name, shape, cut)
    return _in_checkpoint(rule, shard), _in_checkpoint(rule, replace(shard, part=0, num_parts=1))


def _in_checkpoint(rule: CutRule, shard: Shard) -> list[Region]:
    """Return the regions that the shard holds, by names and rows of the checkpoint."""
    found = []
    for region in rule.regions(shard):
        place = _place(shard, region)
        found.append(Region(place.name, box_at(place, region.box), region.row))
    return found


def box_at(place: CheckpointPlace, box: Box) -> Box:
    """Return the box of the checkpoint's parameter that a box of the parameter of Llama is."""
    if place.index is None:
        return box.lowered(place.row)
    return Box((place.index, *reversed(box.lo)), (place.index + 1, *reversed(box.hi)))


def stride_at(place: CheckpointPlace, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the dimensions of the checkpoint's parameter, given those of the dimensions in Llama."""
    return stride if place.index is None else (0, *reversed(stride))


def _place(shard: Shard, region: Region) -> CheckpointPlace:
    return checkpoint_places(shard.architecture)[shard.prefix + region.name]


def _find(architecture: Architecture, name: str, shape: Shape, cut: Cut) -> tuple[CutRule, Shard]:
    layer = LAYER_NAME.fullmatch(name)
    if not layer:
        tables = [SCALAR_HEAD, MODEL] if architecture.scalar_head else [MODEL]
        return _known(tables, name, name), Shard(architecture, "", shape, cut.tp_rank, cut.tp_size)
    prefix = f"model.layers.{layer[1]}."
    rest = layer[2]
    traits = architecture.traits
    attention = FUSED_ATTENTION if traits.fused_qkv else ATTENTION
    if architecture.latent:
        attention = LATENT_ATTENTION
    elif traits.wide_qk_norm:
        attention = {**attention, **WIDE_NORMS}
    elif architecture.linear:
        projections = {"self_attention.in_proj.weight": HeadGroups(traits.linear_sections)}
        attention = {**attention, **LINEAR_ATTENTION, **projections}
    feed_forward = GATED if traits.gated else NOT_GATED
    tables = [LAYER, attention, feed_forward]
    if architecture.experts:
        names = architecture.expert_names
        expert = next(filter(None, (pattern.fullmatch(rest) for pattern in EXPERT_NAMES)), None)
        if expert:
            number = cut.ep_rank * (architecture.experts.num_experts // cut.ep_size) + int(expert["local"])
            shard = Shard(architecture, f"{prefix}{names.block}.experts.{number}.", shape, cut.etp_rank, cut.etp_size)
            return _expert(names)[expert["part"]], shard
        tables.append(_sparse_layer(names))
    return _known(tables, rest, name), Shard(architecture, prefix, shape, cut.tp_rank, cut.tp_size)


def _known(tables: Sequence[Mapping[str, CutRule]], key: str, name: str) -> CutRule:
    for table in tables:
        if key in table:
            return table[key]
    raise UserError(f"Megatron parameter {name} has no rule in megarl.models.weights")
