"""Causal attention over packed sequences, for machines without Transformer Engine.

A micro-batch is one row of tokens, sequence after sequence; no token attends beyond its own sequence. CUDA runs one
variable-length kernel (half precision only), the CPU one batched scaled-dot-product call. Context-parallel ranks, which
share the row (see `packed.py`), gather the keys and values of all ranks and compute the outputs of their own tokens.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.learner.packed import places_of


class PackedAttention(torch.nn.Module):
    """Replacement of Megatron's core attention in the `thd` layout."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [N, heads, head_dim] of this rank's tokens and heads.
            key: [N, groups, head_dim]; `heads` is a multiple of `groups`.
            value: [N, groups, head_dim].
            attention_mask: unused; the mask is causal within `packed_seq_params.cu_seqlens_q`.
            packed_seq_params: Megatron's record of the sequences' bounds in the whole row.

        Returns:
            [N, heads * head_dim]
        """
        lengths = packed_seq_params.cu_seqlens_q.diff().long()
        if self.cp_group.size() > 1:
            key, value = (gather_row(part, lengths, self.cp_group) for part in (key, value))
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if self.cp_group.size() > 1:
            positions = places_of(lengths, self.cp_group.rank(), self.cp_group.size())[1]
            return _batched(query, key, value, lengths, self.scale, positions).flatten(1)
        if query.is_cuda and query.dtype != torch.float32:
            return _varlen(query, key, value, packed_seq_params, self.scale).flatten(1)
        return _batched(query, key, value, lengths, self.scale).flatten(1)


def gather_row(part: Tensor, lengths: Tensor, group: Any) -> Tensor:
    """Gather the [N, ...] tokens of a row, in order, from the [N / size, ...] of each rank of a context-parallel group.

    The rank that holds a token receives the sum of its gradients over all ranks.
    """
    ranks = range(group.size())
    places = torch.cat([places_of(lengths, rank, len(ranks))[0] for rank in ranks])
    gathered: Tensor = gather_from_sequence_parallel_region(part, group=group)
    return gathered[places.argsort()]


def _batched(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, positions: Tensor | None = None
) -> Tensor:
    """Attend within all sequences in one call: zeros pad the shorter sequences, and the causal mask hides the zeros.

    Args:
        query: [M, heads, head_dim], an equal share of every sequence.
        key: [N, heads, head_dim].
        value: [N, heads, head_dim].
        lengths: [S] int64, of the sequences.
        scale: multiplies the logits.
        positions: [M] int64, of the queries within their sequences; None: the queries are all N tokens.
    """
    shares, visible = lengths, None
    if positions is not None:
        shares = lengths * len(query) // len(key)
        visible = torch.arange(int(lengths.max()), device=key.device) <= _grid(positions[:, None], shares)[:, None]
    out = scaled_dot_product_attention(
        _grid(query, shares),
        _grid(key, lengths),
        _grid(value, lengths),
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
    )
    return out.transpose(1, 2).flatten(0, 1)[_places(shares)]


def _places(lengths: Tensor) -> Tensor:
    """Return the places of packed tokens in a [sequences, longest] grid, flattened."""
    inside = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    return inside.flatten().nonzero()[:, 0]


def _grid(packed: Tensor, lengths: Tensor) -> Tensor:
    """Unpack [N, ..., last] tokens to [sequences, ..., longest, last], zero behind the end of each sequence."""
    num_sequences, longest = len(lengths), int(lengths.max())
    flat = packed.new_zeros(num_sequences * longest, *packed.shape[1:]).index_copy(0, _places(lengths), packed)
    return flat.view(num_sequences, longest, *packed.shape[1:]).transpose(1, -2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA builds can run it

    bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    out: Tensor = varlen_attn(query, key, value, *bounds, scale=scale, window_size=(-1, 0))  # type: ignore[assignment]
    return out
