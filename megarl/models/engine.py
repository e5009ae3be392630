"""The cut of a model over the ranks of an engine, from sizes alone: the layout of one rank, the placement of all ranks.

vLLM's own loaders, traced on a live rank (`megarl.rollout.layout`), are the truth, and a test compares these rules with
them. The rules are needed without an engine, and for the other ranks. An engine is a row of neighbouring ranks: rank
`r` has the tensor coordinate `r % tp_size`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megarl.models.architecture import (
    EMBEDDING,
    HEAD,
    Architecture,
    LatentAttention,
    LayerKind,
    checkpoint_places,
    hf_shapes,
    llama_shapes,
    padded_vocabulary,
)
from megarl.models.linear import CONVOLUTION, PREFIX, LinearAttention
from megarl.models.placing import behind, placed
from megarl.models.weights import box_at, stride_at
from megarl.platform.errors import UserError
from megarl.reshard.layout import Box, Layout, Piece, Placement, placement_of, row_major, rows_of, whole


@dataclass(frozen=True)
class _PlacedPart:
    """A box of a Hugging Face parameter, and the strides of its dimensions in a dense tensor of the engine."""

    name: str
    box: Box
    stride: tuple[int, ...]


def engine_layout(
    architecture: Architecture,
    *,
    tp_rank: int,
    tp_size: int,
    expert_parallel: bool,
    dtype: torch.dtype,
    latent_fused: bool,
) -> Layout:
    """Return the layout of a rank of the engine; `param` is vLLM's own name.

    Args:
        architecture: the sizes of the model.
        tp_rank: the tensor-parallel rank in the engine.
        tp_size: the number of tensor-parallel ranks of the engine.
        expert_parallel: each rank holds a block of complete experts, instead of a slice of every expert.
        dtype: of the engine's weights.
        latent_fused: the engine has vLLM's own latent attention, which fuses the two down-projections.

    Raises:
        UserError: a parameter does not divide into `tp_size` equal parts.
    """
    cut = _Cut(architecture, None, tp_rank, tp_size)
    layers = {
        kind: _layer(
            replace(cut, layer=number), dtype, kind, expert_parallel=expert_parallel, latent_fused=latent_fused
        )
        for kind, number in architecture.layer_of_kind.items()
    }
    layout = list(_outside(cut, dtype))
    for number, kind in enumerate(architecture.layer_kinds):
        layout += _in_layer(architecture, number, layers[kind])
    return tuple(layout)


def engine_placement(
    architecture: Architecture, *, num_ranks: int, tp_size: int, expert_parallel: bool, dtype: torch.dtype
) -> Placement:
    """Return the boxes that each rank must hold if every `tp_size` ranks are an engine.

    All layers of a kind are cut alike: boxes are computed for one layer.

    Raises:
        UserError: a parameter does not divide into `tp_size` equal parts, so that some of it would have no rank.
    """
    assert num_ranks % tp_size == 0, (num_ranks, tp_size)
    samples = architecture.layer_of_kind
    layouts = []
    for rank in range(tp_size):
        cut = _Cut(architecture, None, rank, tp_size)
        layout = list(_outside(cut, dtype))
        for kind, number in samples.items():
            of_rank = replace(cut, layer=number)
            layer = _layer(of_rank, dtype, kind, expert_parallel=expert_parallel, latent_fused=False)
            layout += _in_layer(architecture, number, layer)
        layouts.append(layout)
    found = placed(placement_of(layouts), [range(rank, num_ranks, tp_size) for rank in range(tp_size)])
    layers = {kind: behind(architecture.layer_prefix(number), found) for kind, number in samples.items()}
    for number, kind in enumerate(architecture.layer_kinds):
        prefix = architecture.layer_prefix(number)
        found |= {f"{prefix}{name}": boxes for name, boxes in layers[kind].items()}
    return {name: found[name] for name in hf_shapes(architecture)}


@dataclass(frozen=True)
class _Cut:
    """The share of one of `tp_size` ranks in a layer.

    Methods take the names of Llama and return those of the family, both after the layer's prefix.
    """

    architecture: Architecture
    layer: int | None  # None: outside the layers
    tp_rank: int
    tp_size: int

    @property
    def prefix(self) -> str:
        """The beginning of the names of Llama."""
        return "" if self.layer is None else f"model.layers.{self.layer}."

    @property
    def own_prefix(self) -> str:
        """The beginning of the names of the family."""
        return self.architecture.traits.parameter_name(self.prefix)

    def uncut(self) -> "_Cut":
        """Return the cut of an engine with one rank."""
        return replace(self, tp_rank=0, tp_size=1)

    def whole(self, name: str) -> _PlacedPart:
        """Return a complete parameter."""
        return self._placed(name, whole(self._shape(name)))

    def rows(self, name: str, *, num_parts: int | None = None) -> _PlacedPart:
        """Return this rank's slice of the rows. With fewer parts than ranks, neighbours have the same slice."""
        num_parts = num_parts or self.tp_size
        shape = self._shape(name)
        size = _share(shape[0], num_parts, name)
        part = self.tp_rank * num_parts // self.tp_size
        return self._placed(name, rows_of(shape, part * size, (part + 1) * size))

    def section(self, name: str, begin: int, size: int) -> _PlacedPart:
        """Return this rank's slice of the `size` rows from `begin`."""
        share = size // self.tp_size
        first = begin + self.tp_rank * share
        return self._placed(name, rows_of(self._shape(name), first, first + share))

    def columns(self, name: str) -> _PlacedPart:
        """Return this rank's slice of the columns."""
        rows, columns = self._shape(name)
        size = _share(columns, self.tp_size, name)
        return self._placed(name, Box((0, self.tp_rank * size), (rows, (self.tp_rank + 1) * size)))

    def vocabulary(self, name: str) -> list[_PlacedPart]:
        """Return this rank's slice of the padded rows; nothing if all of its rows are padding."""
        shape = self._shape(name)
        size = _share(padded_vocabulary(shape[0]), self.tp_size, name)
        first = self.tp_rank * size
        end = min((self.tp_rank + 1) * size, shape[0])
        return [self._placed(name, rows_of(shape, first, end))] if first < end else []

    def _shape(self, name: str) -> tuple[int, ...]:
        return llama_shapes(self.architecture)[self.prefix + name]

    def _placed(self, name: str, box: Box) -> _PlacedPart:
        place = checkpoint_places(self.architecture)[self.prefix + name]
        own = place.name.removeprefix(self.own_prefix)
        return _PlacedPart(own, box_at(place, box), stride_at(place, row_major(box.shape)))


def _share(size: int, num_parts: int, name: str) -> int:
    """Return the size of equal parts that together are the whole.

    Raises:
        UserError: there are no such parts, and the last rows or columns would have no rank.
    """
    if size % num_parts:
        raise UserError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size: {size} rows or columns of {name} do not divide "
            f"into {num_parts} equal parts: choose a divisor"
        )
    return size // num_parts


def _outside(cut: _Cut, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield the parameters outside the layers."""
    a = cut.architecture
    yield from _stacked(_in_trunk(a.traits.engine_name(a.embedding_name)), cut.vocabulary(EMBEDDING), dtype)
    if not a.tied_embeddings:
        yield from _stacked(HEAD, cut.vocabulary(HEAD), dtype)
    for part in a.traits.norm_parts:
        norm = cut.whole(f"model.norm.{part}")
        yield from _stacked(_in_trunk(norm.name), [norm], dtype)


def _in_trunk(name: str) -> str:
    """Return vLLM's name of a parameter outside the layers: the trunk is `model` in every family."""
    return f"model.{name.partition('.')[2]}"


def _layer(cut: _Cut, dtype: torch.dtype, kind: LayerKind, *, expert_parallel: bool, latent_fused: bool) -> list[Piece]:
    """Return a layer."""
    layer = list(_shared(cut, dtype, kind, latent_fused=latent_fused))
    if kind.is_sparse:
        numbers = _expert_block(cut if expert_parallel else cut.uncut())
        layer += _experts(cut.uncut() if expert_parallel else cut, numbers, dtype)
    return layer


def _shared(cut: _Cut, dtype: torch.dtype, kind: LayerKind, *, latent_fused: bool) -> Iterator[Piece]:
    """Yield a layer without its experts."""
    a = cut.architecture
    for norm in a.norms:
        yield from _copies(cut, [f"{norm}.{part}" for part in a.traits.norm_parts], dtype)
    if a.linear and kind.attention == "linear":
        yield from _linear_attention(cut, a.linear, dtype)
    else:
        yield from _latent(cut, a.latent, dtype, fused=latent_fused) if a.latent else _attention(cut, dtype)
        yield from _row_parallel(cut, "self_attn.o_proj", dtype)
    if not a.traits.gated:
        yield from _column_parallel(cut, "mlp.up_proj", dtype)
        yield from _row_parallel(cut, "mlp.down_proj", dtype)
        return
    if not kind.is_sparse or a.experts is None:
        yield from _swiglu("mlp.", cut, dtype)
        return
    block = a.expert_names.block
    shared = a.expert_names.shared
    router = [f"{block}.gate.{part}" for part in a.traits.linear_parts]
    yield from _copies(cut, router, torch.float32 if a.traits.float32_router else dtype)
    if a.experts.router_bias:
        yield from _copies(cut, [f"{block}.gate.e_score_correction_bias"], torch.float32)
    if a.experts.shared_ffn_hidden_size:
        yield from _swiglu(f"{block}.{shared}.", cut, dtype)
    if a.experts.shared_gate:
        yield from _copies(cut, [f"{block}.{shared}_gate.weight"], dtype)


def _column_parallel(cut: _Cut, name: str, dtype: torch.dtype) -> Iterator[Piece]:
    for part in cut.architecture.traits.linear_parts:
        yield from _alone(cut.rows(f"{name}.{part}"), dtype)


def _row_parallel(cut: _Cut, name: str, dtype: torch.dtype) -> Iterator[Piece]:
    yield from _alone(cut.columns(f"{name}.weight"), dtype)
    if cut.architecture.traits.linear_bias:
        yield from _copies(cut, [f"{name}.bias"], dtype)


def _attention(cut: _Cut, dtype: torch.dtype) -> Iterator[Piece]:
    a = cut.architecture
    if a.traits.fused_qkv:
        yield from _column_parallel(cut, "self_attn.qkv_proj", dtype)
        return
    kv_parts = min(cut.tp_size, a.num_key_value_heads)
    for suffix in ("weight", "bias") if a.qkv_bias else ("weight",):
        keys_and_values = [cut.rows(f"self_attn.{x}_proj.{suffix}", num_parts=kv_parts) for x in "kv"]
        parts = [cut.rows(f"self_attn.q_proj.{suffix}"), *keys_and_values]
        yield from _stacked(f"self_attn.qkv_proj.{suffix}", parts, dtype)
    if a.traits.sinks:
        yield from _alone(cut.rows("self_attn.sinks"), dtype)
    if a.qk_norm:
        norms = [f"self_attn.{x}_norm.weight" for x in "qk"]
        if a.traits.wide_qk_norm and not a.traits.whole_qk_norm:
            yield from _alone(cut.rows(norms[0]), dtype)
            yield from _alone(cut.rows(norms[1], num_parts=kv_parts), dtype)
        else:
            yield from _copies(cut, norms, dtype)


def _linear_attention(cut: _Cut, linear: LinearAttention, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield linear attention. Projections that the engine computes together are stacked, section by section."""
    _share(linear.num_key_heads, cut.tp_size, "the key heads of linear attention")
    projections = cut.architecture.traits.linear_sections
    for param, kinds in {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}.items():
        together = {name: sections for name, sections in projections.items() if {*"".join(sections)} <= {*kinds}}
        yield from _stacked(f"{PREFIX}{param}.weight", list(_sections(cut, linear, together)), dtype)
    yield from _stacked(f"{PREFIX}conv1d.weight", list(_sections(cut, linear, CONVOLUTION)), dtype)
    yield from _alone(cut.rows(f"{PREFIX}dt_bias"), dtype)
    yield from _alone(cut.rows(f"{PREFIX}A_log"), torch.float32)
    yield from _copies(cut, [f"{PREFIX}norm.weight"], dtype)
    yield from _row_parallel(cut, f"{PREFIX}out_proj", dtype)


def _sections(cut: _Cut, linear: LinearAttention, projections: Mapping[str, Sequence[str]]) -> Iterator[_PlacedPart]:
    """Yield this rank's slice of each section of some parameters."""
    for name, sections in projections.items():
        begin = 0
        for kinds in sections:
            size = linear.size(kinds)
            yield cut.section(f"{PREFIX}{name}.weight", begin, size)
            begin += size


def _latent(cut: _Cut, latent: LatentAttention, dtype: torch.dtype, *, fused: bool) -> Iterator[Piece]:
    """Yield latent attention; every rank has complete down-projections."""
    down = ["self_attn.kv_a_proj_with_mqa.weight"]
    up = ["self_attn.kv_b_proj.weight"]
    norms = ["self_attn.kv_a_layernorm.weight"]
    if latent.q_lora_rank is None:
        up.append("self_attn.q_proj.weight")
    else:
        down.insert(0, "self_attn.q_a_proj.weight")
        norms.append("self_attn.q_a_layernorm.weight")
        up.append("self_attn.q_b_proj.weight")
    if fused and len(down) > 1:
        yield from _stacked("self_attn.fused_qkv_a_proj.weight", [cut.whole(name) for name in down], dtype)
    else:
        yield from _copies(cut, down, dtype)
    yield from _copies(cut, norms, dtype)
    for name in up:
        yield from _stacked(name, [cut.rows(name)], dtype)


def _swiglu(prefix: str, cut: _Cut, dtype: torch.dtype) -> Iterator[Piece]:
    gate_up = [cut.rows(f"{prefix}{half}_proj.weight") for half in ("gate", "up")]
    yield from _stacked(f"{prefix}gate_up_proj.weight", gate_up, dtype)
    yield from _stacked(f"{prefix}down_proj.weight", [cut.columns(f"{prefix}down_proj.weight")], dtype)


def _experts(cut: _Cut, numbers: range, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield experts, fused into two parameters: `[expert, gate and up, hidden]` and `[expert, hidden, down]`."""
    names = cut.architecture.expert_names
    fused = f"{names.block}.experts.routed_experts."
    if names.gate_up:
        yield from _stacked_experts(cut, numbers, dtype)
        return
    if not numbers:
        return
    prefix = f"{names.block}.experts."
    first = f"{prefix}{numbers.start}."
    of_first = {
        "w13_weight": [cut.rows(f"{first}{half}.weight") for half in (names.gate, names.up)],
        "w2_weight": [cut.columns(f"{first}{names.down}.weight")],
    }
    for index, number in enumerate(numbers):  # all are cut as the first
        for param, parts in of_first.items():
            own = [_PlacedPart(part.name.replace(first, f"{prefix}{number}."), part.box, part.stride) for part in parts]
            yield from _stacked(f"{fused}{param}", own, dtype, index=index)


def _stacked_experts(cut: _Cut, numbers: range, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield the experts `numbers` of parameters that have all experts, as in `_experts`, and their biases."""
    names = cut.architecture.expert_names
    prefix = f"{names.block}.experts.{numbers.start}."
    parts = {
        "w13_weight": cut.rows(f"{prefix}{names.gate_up}.weight"),
        "w13_bias": cut.rows(f"{prefix}{names.gate_up}.bias"),
        "w2_weight": cut.columns(f"{prefix}{names.down}.weight"),
    }
    if cut.tp_rank == 0:  # the outputs of the ranks are added
        parts["w2_bias"] = cut.whole(f"{prefix}{names.down}.bias")
    for param, first in parts.items():
        box = Box((numbers.start, *first.box.lo[1:]), (numbers.stop, *first.box.hi[1:]))
        stride = first.box.numel, *first.stride[1:]
        yield Piece(first.name, box, f"{names.block}.experts.routed_experts.{param}", 0, stride, dtype)


def _expert_block(cut: _Cut) -> range:
    """Return the experts of a rank with complete experts. If they do not divide, the first ranks have one more."""
    experts = cut.architecture.experts
    size, more = divmod(experts.num_experts if experts else 0, cut.tp_size)
    first = cut.tp_rank * size + min(cut.tp_rank, more)
    return range(first, first + size + (cut.tp_rank < more))


def _copies(cut: _Cut, names: Iterable[str], dtype: torch.dtype) -> Iterator[Piece]:
    """Yield parameters that every rank has complete, under their own names."""
    for name in names:
        yield from _alone(cut.whole(name), dtype)


def _alone(part: _PlacedPart, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield a part as a parameter of its own name."""
    return _stacked(part.name, [part], dtype)


def _stacked(param: str, parts: Sequence[_PlacedPart], dtype: torch.dtype, *, index: int = 0) -> Iterator[Piece]:
    """Yield parts below one another, as element `index` of `param`."""
    offset = index * sum(part.box.numel for part in parts)
    for part in parts:
        yield Piece(part.name, part.box, param, offset, part.stride, dtype)
        offset += part.box.numel


def _in_layer(a: Architecture, number: int, layer: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with their layer's prefix in both names."""
    prefix = a.layer_prefix(number)
    of_param = f"model.layers.{number}."
    own_names = {param: of_param + a.traits.engine_name(param) for param in {piece.param for piece in layer}}
    return [  # a large model has a hundred thousand pieces, and `replace` takes longer
        Piece(prefix + piece.name, piece.box, own_names[piece.param], piece.offset, piece.stride, piece.dtype)
        for piece in layer
    ]
