"""Causal attention over packed sequences, for machines without Transformer Engine.

A micro-batch is one row of tokens in which sequences follow each other; no token attends beyond its own sequence. On
CUDA that is one variable-length kernel (half precision only), elsewhere one batched scaled-dot-product call. Ranks that
share the row (context parallelism, see `packed.py`) gather the keys and values of all and ask for their own tokens.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.learner.packed import places_of


class PackedAttention(torch.nn.Module):
    """Drop-in for Megatron's core attention in the `thd` layout."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [N, heads, head_dim], this rank's tokens of the row, and its heads.
            key: [N, groups, head_dim]; `heads` is a multiple of `groups`.
            value: [N, groups, head_dim].
            attention_mask: unused; the mask is causal within `packed_seq_params.cu_seqlens_q`.
            packed_seq_params: Megatron's record of where sequences start in the whole row.

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
    """[N, ...] tokens of a row in its order, from the [N / size, ...] of each rank of a context-parallel group.

    The gradient of a token is summed over the ranks, at the one that has it.
    """
    ranks = range(group.size())
    places = torch.cat([places_of(lengths, rank, len(ranks))[0] for rank in ranks])
    gathered: Tensor = gather_from_sequence_parallel_region(part, group=group)
    return gathered[places.argsort()]


def _batched(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, positions: Tensor | None = None
) -> Tensor:
    """One call for all sequences: behind the end of a shorter one stand zeros, which the causal mask hides from it.

    `positions` are those of the queries within their sequences, of each of which they are an equal share; None: of all.
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
    """The places of packed tokens in a [sequences, longest] grid."""
    inside = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    return inside.flatten().nonzero()[:, 0]


def _grid(packed: Tensor, lengths: Tensor) -> Tensor:
    """[sequences, ..., longest, last] from packed [N, ..., last] tokens, zero behind the end of each sequence."""
    num_sequences, longest = len(lengths), int(lengths.max())
    flat = packed.new_zeros(num_sequences * longest, *packed.shape[1:]).index_copy(0, _places(lengths), packed)
    return flat.view(num_sequences, longest, *packed.shape[1:]).transpose(1, -2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA builds can run it

    bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    out: Tensor = varlen_attn(query, key, value, *bounds, scale=scale, window_size=(-1, 0))  # type: ignore[assignment]
    return out
