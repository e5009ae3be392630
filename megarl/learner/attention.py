"""Causal attention over packed sequences, for machines without Transformer Engine.

A micro-batch is one row of tokens in which sequences follow each other; no token attends beyond its own sequence. On
CUDA that is one variable-length kernel (half precision only), elsewhere one batched scaled-dot-product call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Drop-in for Megatron's core attention in the `thd` layout."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [N, heads, head_dim], the packed tokens of this rank's heads.
            key: [N, groups, head_dim]; `heads` is a multiple of `groups`.
            value: [N, groups, head_dim].
            attention_mask: unused; the mask is causal within `packed_seq_params.cu_seqlens_q`.
            packed_seq_params: Megatron's record of where sequences start.

        Returns:
            [N, heads * head_dim]
        """
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if query.is_cuda and query.dtype != torch.float32:
            return _varlen(query, key, value, packed_seq_params, self.scale).flatten(1)
        return _batched(query, key, value, packed_seq_params.cu_seqlens_q.diff(), self.scale).flatten(1)


def _batched(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One call for all sequences: behind the end of a shorter one stand zeros, which the causal mask hides from it."""
    num_sequences, longest = len(lengths), int(lengths.max())
    inside = torch.arange(longest, device=lengths.device) < lengths[:, None]
    places = inside.flatten().nonzero()[:, 0]  # of the packed tokens in a [num_sequences, longest] grid

    def pad(packed: Tensor) -> Tensor:
        grid = packed.new_zeros(num_sequences * longest, *packed.shape[1:]).index_copy(0, places, packed)
        return grid.view(num_sequences, longest, *packed.shape[1:]).transpose(1, 2)

    out = scaled_dot_product_attention(pad(query), pad(key), pad(value), is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)[places]


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA builds can run it

    bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    out: Tensor = varlen_attn(query, key, value, *bounds, scale=scale, window_size=(-1, 0))  # type: ignore[assignment]
    return out
