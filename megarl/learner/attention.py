"""Causal attention over packed sequences, for machines without Transformer Engine.

A micro-batch is one row of tokens, sequence after sequence; no token attends beyond its own sequence. CUDA runs one
variable-length kernel (half precision only), the CPU scaled-dot-product attention. Context-parallel ranks, which
share the row (see `packed.py`), gather the keys and values of all ranks and compute the outputs of their own tokens.

The call takes a grid of equal lengths, so the CPU makes one call for each group of sequences of similar lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.learner.context import Context
from megarl.learner.norm import RMSNorm, RowSharded
from megarl.learner.packed import Bounds, places_of
from megarl.learner.per_tensor import PerTensor
from megarl.learner.shared_rows import gather_row, selected
from megarl.learner.sinks import attention_with_sinks, varlen_with_sinks
from megarl.models.rotary import QueryScaling
from megarl.platform.device import to_device

_groups = PerTensor["Groups"]()  # by the bounds of the row
_factors = PerTensor[dict[QueryScaling, Tensor]]()  # [N, 1, 1], by the bounds of the row


class PackedAttention(torch.nn.Module):
    """Replacement of Megatron's core attention in the `thd` layout."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__()
        self.scale = config.softmax_scale or config.kv_channels**-0.5
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Bounds,
        **_: object,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [N, heads, head_dim] of this rank's tokens and heads.
            key: [N, groups, head_dim]; `heads` is a multiple of `groups`.
            value: [N, groups, head_dim].
            attention_mask: unused; the mask is causal within `packed_seq_params.cu_seqlens_q`.
            packed_seq_params: the `Bounds` of the sequences in the whole row.

        Returns:
            [N, heads * head_dim]
        """
        bounds = packed_seq_params.cu_seqlens_q
        query, key = self.prepared(query, key, bounds)
        key, value = (gather_row(part, packed_seq_params, self.cp_group) for part in (key, value))
        if query.is_cuda and query.dtype != torch.float32 and self.cp_group.size() == 1:
            out = _varlen(query, key, value, packed_seq_params, self.scale, self.window, self.sinks())
            return out.flatten(1)
        # The CPU's kernel groups heads; on CUDA, only torch's slowest kernel does in float32.
        if query.is_cuda or self.sinks() is not None:
            key = _repeated(key, query)
            value = _repeated(value, query)
        groups = _groups.get(bounds, partial(Groups, packed_seq_params.lengths, self.cp_group, query.device))
        return groups.attend(query, key, value, self.scale, self.window, self.sinks()).flatten(1)

    def prepared(self, query: Tensor, key: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys as they are multiplied. `bounds` `[S + 1]` are those of the sequences."""
        return query, key

    def sinks(self) -> Tensor | None:
        """Return a logit of each head in the denominator of its softmax; None: there is none."""
        return None


class NormedAttention(PackedAttention):
    """`PackedAttention` of queries and keys that it normalises, after their rotation."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config, layer_number)
        self.q_layernorm = RMSNorm(config, config.kv_channels, config.layernorm_epsilon)
        self.k_layernorm = RMSNorm(config, config.kv_channels, config.layernorm_epsilon)

    def prepared(self, query: Tensor, key: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys."""
        return self.q_layernorm(query), self.k_layernorm(key)


class ScaledQueryAttention(PackedAttention):
    """`PackedAttention` of queries that it multiplies by factors of their positions, after their rotation."""

    scaling: QueryScaling
    """Set when the model is built."""

    def prepared(self, query: Tensor, key: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply queries by factors in float32, as vLLM does."""
        factors = _factors.get(bounds, dict)
        if self.scaling not in factors:
            positions = places_of(bounds.diff().long(), self.cp_group.rank(), self.cp_group.size(), len(query))[1]
            periods = positions.div(self.scaling.length, rounding_mode="floor")
            factors[self.scaling] = (1.0 + self.scaling.beta * periods.float().log1p())[:, None, None]
        return (query * factors[self.scaling]).to(query.dtype), key


class GatedAttention(SelfAttention):
    """Megatron's attention with gates of its output. Tensor-parallel ranks may share the heads of a group."""

    def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates of this rank's heads; Megatron returns the gates of the group."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        place = parallel_state.get_tensor_model_parallel_rank() % (gate.shape[2] // query.shape[2])
        return query, key, value, gate.chunk(gate.shape[2] // query.shape[2], dim=2)[place]

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the output times its gates. Megatron's method compiles at its first call, which needs a compiler."""
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


class SinkAttention(RowSharded, PackedAttention):
    """`PackedAttention` with a learnt logit of each head in the denominator of its softmax (gpt-oss).

    The parameter has the name that it has in Megatron's own attention.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config, layer_number)
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sinks(self) -> Tensor:
        """Return the logits of this rank's heads."""
        return self.softmax_offset


class Groups:
    """The sequences of a packed row, by length, in groups that one call computes."""

    def __init__(self, lengths: Tensor, cp_group: dist.ProcessGroup, device: torch.device) -> None:
        """Divide sequences whose tokens the ranks of `cp_group` share.

        Args:
            lengths: [S] int64, a tensor of the host, so that the host never waits for the device.
            cp_group: the context-parallel group.
            device: of the tokens.
        """
        cp_size = cp_group.size()
        lengths = lengths[lengths > 0]  # torch's kernel divides by the length of a group: none may be empty
        order = lengths.argsort(descending=True, stable=True)
        groups = order.split(similar(lengths[order].tolist()))
        self._keys = Grids(lengths, groups, device)
        self._queries = self._keys if cp_size == 1 else Grids(lengths // cp_size, groups, device)
        self._has_all_queries = cp_size == 1
        self._positions = to_device(places_of(lengths, cp_group.rank(), cp_size)[1], device)  # of this rank's tokens
        self._masks = dict[int | None, list[Tensor]]()  # by the window

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [N / cp_size, heads, head_dim] of this rank's tokens.
            key: [N, groups, head_dim]; `heads` is a multiple of `groups`.
            value: [N, groups, head_dim].
            scale: multiplies the logits.
            window: the tokens that a query sees, itself included; None: all up to itself.
            sinks: [heads], a logit of each head in the denominator of its softmax; None: none.

        Returns:
            [N / cp_size, heads, head_dim]
        """
        attention: Callable[..., Tensor] = scaled_dot_product_attention
        if sinks is not None:
            attention = partial(attention_with_sinks, sinks=sinks)
        queries = self._queries.spread(query)
        keys = self._keys.spread(key)
        values = self._keys.spread(value)
        outs = [
            attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            for q, k, v, mask in zip(queries, keys, values, self._visible(window), strict=True)
        ]
        return self._queries.collect(outs)

    def _visible(self, window: int | None) -> Sequence[Tensor | None]:
        """Return for each group the keys that a query sees, [sequences, 1, longest share, longest] bool.

        None stands for those up to the query's own place.
        """
        if window is None and self._has_all_queries:
            return [None] * len(self._keys.shapes)
        if window not in self._masks:
            positions = self._queries.spread(self._positions[:, None, None])
            self._masks[window] = [
                _is_seen(of_group, num_keys, window)
                for of_group, (_, num_keys) in zip(positions, self._keys.shapes, strict=True)
            ]
        return self._masks[window]


def _is_seen(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Return whether queries at `positions` [..., n, 1] see each of the first keys, [..., n, num_keys] bool."""
    behind = positions - torch.arange(num_keys, device=positions.device)
    return (behind >= 0) & (behind < (window or num_keys))


class Grids:
    """A [sequences, longest] grid for each group of the sequences of a row, which lie there end to end.

    Behind the end of a sequence its last token is repeated. No token before sees the repeats, and their outputs are
    dropped, so their gradients are zero.
    """

    def __init__(self, lengths: Tensor, groups: Sequence[Tensor], device: torch.device) -> None:
        """Lay out sequences of `lengths` [S] int64, all positive, on `device`.

        `groups` have the numbers of their sequences, int64. All tensors are those of the host.
        """
        starts = lengths.cumsum(0) - lengths
        self.shapes = [(len(group), int(lengths[group].max())) for group in groups]
        tokens = []
        repeats = []
        for group, (_, longest) in zip(groups, self.shapes, strict=True):
            place = torch.arange(longest)
            last = lengths[group, None] - 1
            tokens.append((starts[group, None] + place.minimum(last)).flatten())
            repeats.append((place > last).flatten())
        token_of = torch.cat(tokens)
        is_repeat = torch.cat(repeats)
        firsts = (~is_repeat).nonzero()[:, 0]
        self._cells: _Cells | None = None  # the grids are the row
        if not torch.equal(token_of, torch.arange(int(lengths.sum()))):
            self._cells = _Cells(
                token_of=to_device(token_of, device),
                cell_of=to_device(firsts[token_of[firsts].argsort()], device),
                repeats=to_device(is_repeat.nonzero()[:, 0], device),
            )

    def spread(self, row: Tensor) -> list[Tensor]:
        """Return [sequences, heads, longest, head_dim] of each group, of a row of tokens, [n, heads, head_dim]."""
        if self._cells:
            row = selected(row, self._cells.token_of, self._cells.cell_of)
        parts = row.split([num * longest for num, longest in self.shapes])
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)]

    def collect(self, grids: Sequence[Tensor]) -> Tensor:
        """Return the row of tokens, [n, heads, head_dim], of [sequences, heads, longest, head_dim] of each group."""
        parts = [grid.transpose(1, 2).flatten(0, 1) for grid in grids]
        cells = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._cells is None:
            return cells
        row: Tensor = _Collection.apply(cells, self._cells)
        return row


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """The cells of the grids of a row, one grid after the other; all tensors are int64."""

    token_of: Tensor  # [cells], the place in the row of the token of each cell
    cell_of: Tensor  # [n], the first cell of each token
    repeats: Tensor  # [cells - n], the cells that repeat a token


class _Collection(torch.autograd.Function):
    """The tokens of grids in the order of the row. Torch's gradient of a selection would add row to row."""

    @staticmethod
    def forward(ctx: Context[_Cells], grids: Tensor, cells: _Cells) -> Tensor:
        ctx.settings = cells
        return grids.index_select(0, cells.cell_of)

    @staticmethod
    def backward(ctx: Context[_Cells], gradient: Tensor) -> tuple[Tensor | None, ...]:
        cells = ctx.settings
        return gradient.index_select(0, cells.token_of).index_fill_(0, cells.repeats, 0.0), None


def similar(lengths: Sequence[int]) -> list[int]:
    """Return the number of sequences in each group, given descending lengths. Padding is at most a quarter of each."""
    counts = [0]
    longest = lengths[0]
    for length in lengths:
        if length * 5 < longest * 4:
            counts.append(0)
            longest = length
        counts[-1] += 1
    return counts


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Bounds,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA builds can run it

    bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    sizes = (-1 if window is None else window - 1, 0)
    if sinks is not None:
        return varlen_with_sinks(query, _repeated(key, query), _repeated(value, query), sinks, bounds, scale, sizes)
    grouping: dict[str, bool] = {}
    if _groups_heads():
        grouping["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key = _repeated(key, query)
        value = _repeated(value, query)
    out: Tensor = varlen_attn(query, key, value, *bounds, scale=scale, window_size=sizes, **grouping)  # type: ignore[arg-type, assignment]
    return out


@cache
def _groups_heads() -> bool:
    """Return whether torch's attention over a row lets several query heads share keys: 2.13 does, and 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def _repeated(part: Tensor, query: Tensor) -> Tensor:
    """Give each query head its own copy of the keys or values of its group."""
    repeats = query.shape[1] // part.shape[1]
    return part.repeat_interleave(repeats, dim=1) if repeats > 1 else part
