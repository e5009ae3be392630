"""Causal attention over packed sequences, for machines without Transformer Engine.

A micro-batch is one row of tokens in which sequences follow each other; no token attends beyond its own sequence. On
CUDA that is one variable-length kernel (half precision only), elsewhere one batched scaled-dot-product call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence


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
    splits = lengths.tolist()
    padded = (pad_sequence(tensor.split(splits), batch_first=True).transpose(1, 2) for tensor in (query, key, value))
    out = scaled_dot_product_attention(*padded, is_causal=True, scale=scale).transpose(1, 2)
    return out[torch.arange(out.shape[1], device=out.device) < lengths[:, None]]


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA builds can run it

    bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    return varlen_attn(query, key, value, *bounds, scale=scale, window_size=(-1, 0))
