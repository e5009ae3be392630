"""vLLM's own operations, written out. They write their results into arguments, as vLLM's kernels do."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.hollow.solid.attention import attend, by_head

# ---- between the layers ----


def rms_norm(result: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Compute `_C::rms_norm`: the normalized numbers are rounded before they meet the weight."""
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    result.copy_((normal if weight is None else normal * weight).view(result.shape))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Compute `_C::fused_add_rms_norm`: the sum stays in `residual`, and its normalized numbers in `x`."""
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(result: Tensor, x: Tensor) -> None:
    """Compute `_C::silu_and_mul` of gates and values that lie side by side."""
    gate, value = x.chunk(2, dim=-1)
    result.copy_(silu(gate.float()).to(x.dtype) * value)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin: Tensor,
    is_neox: bool,
    offset: int = 0,
    inverse: bool = False,
) -> None:
    """Compute `_C::rotary_embedding`: rotate the first numbers of each head, pairs of halves or of neighbours."""
    assert offset == 0
    assert not inverse
    cos, sin = cos_sin[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, pairs]
    pairs = cos.shape[-1]
    for rotated in (query, key):
        if rotated is None:
            continue
        heads = rotated.view(positions.numel(), -1, head_size)
        part = heads[..., : 2 * pairs]
        places = (slice(0, pairs), slice(pairs, None)) if is_neox else (slice(0, None, 2), slice(1, None, 2))
        first, second = (part[..., place].float() for place in places)
        part[..., places[0]] = (first * cos - second * sin).to(part.dtype)
        part[..., places[1]] = (second * cos + first * sin).to(part.dtype)


# ---- the cache of keys and values ----


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, dtype: str, *scales: Tensor
) -> None:
    """Compute `_C_cache_ops::reshape_and_cache_flash`: write [n, heads, D] into [blocks, block size, heads, D].

    Tokens of padding have slot -1.
    """
    assert dtype == "auto"
    size = key_cache.shape[1]
    kept = slots >= 0
    blocks, places = slots[kept] // size, slots[kept] % size
    key_cache[blocks, places] = key[: len(slots)][kept]
    value_cache[blocks, places] = value[: len(slots)][kept]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor | None,
    bounds: Tensor,
    lengths: Tensor,
    table: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to the first `lengths` keys and values in the blocks that each row of `table` names.

    Returns:
        [n, heads, D] in the type of `query`, which is `out` if there is one, and [heads, n] float32 log-sums.
    """
    out = torch.empty_like(query) if out is None else out
    sums = torch.zeros(query.shape[1], query.shape[0])
    starts, num_heads = bounds.tolist(), query.shape[1]
    for row, length in enumerate(lengths.tolist()):
        queries = slice(starts[row], starts[row + 1])
        if queries.start == queries.stop:
            continue
        keys, values = (cache[table[row].long()].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
        parts = (by_head(part, num_heads) for part in (query[queries], keys, values))
        found, sums[:, queries] = attend(*parts, None, is_causal, scale)
        out[queries] = found.transpose(0, 1)
    return out, sums


def flash_attention_3(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Compute `_vllm_fa3_C::fwd` for a cache in blocks."""
    out, bounds, lengths, table, scale, is_causal, left, right, softcap = (
        rest[place] for place in (3, 4, 8, 11, 20, 21, 22, 23, 24)
    )
    assert (left, softcap) == (-1, 0.0)
    assert right in (-1, 0)
    found = paged_attention(query, key, value, out, bounds, lengths, table, is_causal or right == 0, scale)
    return *found, torch.empty(0), torch.empty(0)  # nobody reads the parts


def flash_attention_2(query: Tensor, key: Tensor, value: Tensor, out: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    """Compute `_vllm_fa2_C::varlen_fwd` for a cache in blocks."""
    bounds, lengths, table, scale, is_causal, left, right, softcap = (
        rest[place] for place in (0, 2, 4, 9, 11, 12, 13, 14)
    )
    assert (left, softcap) == (-1, 0.0)
    assert right in (-1, 0)
    return paged_attention(query, key, value, out, bounds, lengths, table, is_causal or right == 0, scale)


# ---- experts ----


def topk_softmax(
    weights: Tensor,
    experts: Tensor,
    places: Tensor,
    logits: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    is_padding: Tensor | None,
) -> None:
    """Compute `_moe_C::topk_softmax`: the experts of each token, and their probabilities."""
    assert bias is None
    found, chosen = logits.float().softmax(-1).topk(weights.shape[-1], dim=-1)
    weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
    experts.copy_(chosen)
    places.copy_(torch.arange(places.numel()).view(places.shape[1], places.shape[0]).T)


def moe_align_block_size(
    experts: Tensor,
    num_experts: int,
    block: int,
    order: Tensor,
    of_block: Tensor,
    num_padded: Tensor,
    expert_map: Tensor | None,
    scatter: Tensor | None = None,
) -> None:
    """Compute `_moe_C::moe_align_block_size`: the tokens by expert, each expert's padded to whole blocks.

    Padding has the number of all tokens, and names none.
    """
    assert expert_map is None
    assert scatter is None
    flat = experts.flatten()
    order.fill_(flat.numel())
    of_block.zero_()
    end = 0
    for expert in range(num_experts):
        tokens = (flat == expert).nonzero()[:, 0]
        blocks = -(-len(tokens) // block)
        order[end : end + len(tokens)] = tokens.to(order.dtype)
        of_block[end // block : end // block + blocks] = expert
        end += blocks * block
    num_padded.fill_(end)


def moe_sum(x: Tensor, result: Tensor, experts: Tensor | None = None, expert_map: Tensor | None = None) -> None:
    """Compute `_moe_C::moe_sum`: add what the experts of a token give."""
    assert expert_map is None
    result.copy_(x.float().sum(1))


# ---- sampling ----


def filter_tokens_in_torch(module: Any) -> None:
    """Let torch filter the most likely tokens: Triton cannot interpret vLLM's kernel for it."""

    def apply(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, top_k, top_p)

    module.apply_top_k_top_p_triton = apply


WRITTEN_OUT = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::rotary_embedding": rotary_embedding,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
    "_vllm_fa2_C::varlen_fwd": flash_attention_2,
    "_vllm_fa3_C::fwd": flash_attention_3,
    "_moe_C::topk_softmax": topk_softmax,
    "_moe_C::moe_align_block_size": moe_align_block_size,
    "_moe_C::moe_sum": moe_sum,
}
