"""vLLM's own operations, written out. They write their results into arguments, as vLLM's kernels do."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.hollow.solid.attention import attend, by_head, outside_window, sequences

# ---- outside attention ----


def vocab_parallel_embedding(
    result: Tensor, tokens: Tensor, weight: Tensor, start: int, end: int, padding: int, added: int, end_of_added: int
) -> None:
    """Compute `_C::vocab_parallel_embedding`: the rows of this rank's tokens, and zeros for those of other ranks."""
    assert added == end_of_added
    is_here = (tokens >= start) & (tokens < end)
    result.copy_(weight[(tokens - start).where(is_here, 0).long()] * is_here[:, None])


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


def gelu_tanh_and_mul(result: Tensor, x: Tensor) -> None:
    """Compute `_C::gelu_tanh_and_mul` of gates and values that lie side by side."""
    gate, value = x.chunk(2, dim=-1)
    result.copy_(gelu(gate.float(), approximate="tanh").to(x.dtype) * value)


def swigluoai_and_mul(result: Tensor, x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """Compute `_C::swigluoai_and_mul` of gates and values in turn."""
    gate, value = x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
    result.copy_(gate * (alpha * gate).sigmoid() * (value + 1.0))


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


def write_to_slots(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """Write [n, ...] tokens into a cache of [blocks, block size, ...]. Tokens of padding have slot -1."""
    size, kept = cache.shape[1], slots >= 0
    cache[slots[kept] // size, slots[kept] % size] = tokens[: len(slots)][kept]


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, dtype: str, *scales: Tensor
) -> None:
    """Compute `_C_cache_ops::reshape_and_cache_flash`: write [n, heads, D] into [blocks, block size, heads, D].

    Tokens of padding have slot -1.
    """
    assert dtype == "auto"
    write_to_slots(key_cache, key, slots)
    write_to_slots(value_cache, value, slots)


def concat_and_cache_mla(
    latents: Tensor, rotated: Tensor, cache: Tensor, slots: Tensor, dtype: str, scale: Tensor
) -> None:
    """Compute `_C_cache_ops::concat_and_cache_mla`: write latents and rotated keys into [blocks, block size, D]."""
    assert dtype == "auto"
    write_to_slots(cache, torch.cat([latents, rotated.view(len(rotated), -1)], dim=-1), slots)


Sequence = tuple[slice, Tensor, Tensor]  # places of the queries, [m, groups, D] keys and [m, groups, D'] values


def in_blocks(
    key_cache: Tensor, value_cache: Tensor, bounds: Tensor, lengths: Tensor, table: Tensor
) -> Iterator[Sequence]:
    """Yield the sequences of a cache: the first `lengths` tokens in the blocks that each row of `table` names."""
    starts = bounds.tolist()
    for row, length in enumerate(lengths.tolist()):
        keys, values = (cache[table[row].long()].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
        yield slice(starts[row], starts[row + 1]), keys, values


def side_by_side(key: Tensor, value: Tensor, bounds: Tensor, key_bounds: Tensor) -> Iterator[Sequence]:
    """Yield the sequences of a row of tokens."""
    for queries, keys in sequences(bounds, key_bounds):
        yield queries, key[keys], value[keys]


def attend_to_each(
    query: Tensor, found: Iterator[Sequence], out: Tensor, is_causal: bool, left: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Let [n, heads, D] queries attend to their sequences, no further back than `left` keys if it is not -1.

    Returns:
        `out`, [n, heads, D'], with the results, and [heads, n] float32 log-sums.
    """
    num_heads = query.shape[1]
    sums = torch.zeros(num_heads, query.shape[0])
    for queries, keys, values in found:
        if queries.start == queries.stop:
            continue
        parts = (by_head(part, num_heads) for part in (query[queries], keys, values))
        hidden = outside_window(queries.stop - queries.start, len(keys), left)
        attended, sums[:, queries] = attend(*parts, hidden, is_causal, scale)
        out[queries] = attended.transpose(0, 1)
    return out, sums


def flash_attention_3(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Compute `_vllm_fa3_C::fwd` for sequences side by side, or in the blocks of a cache.

    Queries may have a second part, which meets the values: the latents, in latent attention.
    """
    query_of_values, out, bounds, key_bounds, lengths, table, scale, is_causal, left, right, softcap = (
        rest[place] for place in (2, 3, 4, 5, 8, 11, 20, 21, 22, 23, 24)
    )
    sinks = rest[30] if len(rest) > 30 else None  # torch leaves arguments out that are their defaults
    assert softcap == 0.0
    assert right in (-1, 0)
    out = query.new_empty(*query.shape[:2], value.shape[-1]) if out is None else out
    if query_of_values is not None:
        query, key = torch.cat([query, query_of_values], dim=-1), torch.cat([key, value], dim=-1)
    found = (
        side_by_side(key, value, bounds, key_bounds) if table is None else in_blocks(key, value, bounds, lengths, table)
    )
    out, sums = attend_to_each(query, found, out, is_causal or right == 0, left, scale)
    if sinks is not None:  # a logit of each head in the denominator of its softmax
        out *= (sums - sinks.float()[:, None]).sigmoid().T[..., None].to(out.dtype)
    return out, sums, torch.empty(0), torch.empty(0)


def flash_attention_2(query: Tensor, key: Tensor, value: Tensor, out: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    """Compute `_vllm_fa2_C::varlen_fwd` for a cache in blocks."""
    bounds, lengths, table, scale, is_causal, left, right, softcap = (
        rest[place] for place in (0, 2, 4, 9, 11, 12, 13, 14)
    )
    assert softcap == 0.0
    assert right in (-1, 0)
    out = torch.empty_like(query) if out is None else out
    found = in_blocks(key, value, bounds, lengths, table)
    return attend_to_each(query, found, out, is_causal or right == 0, left, scale)


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
    """Compute `_moe_C::topk_softmax`: the experts of each token, by scores with a bias; their weights have none."""
    _choose(weights, experts, places, logits.float().softmax(-1), renormalize, bias)


def topk_sigmoid(
    weights: Tensor,
    experts: Tensor,
    places: Tensor,
    logits: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    scale: float,
    is_padding: Tensor | None,
) -> None:
    """Compute `_moe_C::topk_sigmoid`: the experts of each token, by scores with a bias; their weights have none."""
    assert scale == 1.0
    _choose(weights, experts, places, logits.float().sigmoid(), renormalize, bias)


def _choose(
    weights: Tensor, experts: Tensor, places: Tensor, scores: Tensor, renormalize: bool, bias: Tensor | None
) -> None:
    chosen = (scores if bias is None else scores + bias).topk(weights.shape[-1], dim=-1).indices
    found = scores.gather(-1, chosen)
    weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
    experts.copy_(chosen)
    places.copy_(torch.arange(places.numel()).view(places.shape[1], places.shape[0]).T)


def grouped_topk(
    scores: Tensor,
    num_groups: int,
    num_chosen_groups: int,
    top_k: int,
    renormalize: bool,
    scale: float,
    bias: Tensor,
    activation: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute `_moe_C::grouped_topk`: experts of the best groups, by scores with a bias; their weights have none."""
    scores = scores.float().sigmoid() if activation else scores.float()
    biased = (scores + bias).unflatten(-1, (num_groups, -1))
    best = biased.topk(2, dim=-1).values.sum(-1).topk(num_chosen_groups, dim=-1).indices
    is_outside = torch.ones(biased.shape[:2], dtype=torch.bool).scatter_(1, best, False)
    chosen = biased.masked_fill(is_outside[..., None], -torch.inf).flatten(1).topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, chosen.int()


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


WRITTEN_OUT = {
    "_C::vocab_parallel_embedding": vocab_parallel_embedding,
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::gelu_tanh_and_mul": gelu_tanh_and_mul,
    "_C::swigluoai_and_mul": swigluoai_and_mul,
    "_C::rotary_embedding": rotary_embedding,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
    "_C_cache_ops::concat_and_cache_mla": concat_and_cache_mla,
    "_vllm_fa2_C::varlen_fwd": flash_attention_2,
    "_vllm_fa3_C::fwd": flash_attention_3,
    "_moe_C::topk_softmax": topk_softmax,
    "_moe_C::topk_sigmoid": topk_sigmoid,
    "_moe_C::grouped_topk": grouped_topk,
    "_moe_C::moe_align_block_size": moe_align_block_size,
    "_moe_C::moe_sum": moe_sum,
}
