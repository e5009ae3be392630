"""Attention, written out: what CUDA's kernels compute and the CPU has no kernel for.

Everything is computed in float32 and rounded once. Gradients are written out too, because autograd records nothing
below a dispatch mode.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def scaled(query: Tensor, scale: float | None) -> float:
    """Return the factor of the scores: by default 1 / sqrt(D)."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Return [..., queries, keys] float32 scaled scores of [..., queries, D] and [..., keys, D].

    The mask is aligned with the last key: the last query sees all keys. Equal lengths are torch's causal mask.
    """
    found = query.float() @ key.float().transpose(-1, -2) * scaled(query, scale)
    if bias is not None:
        found = found + bias
    if is_causal:
        hidden = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1 + found.shape[-1] - found.shape[-2])
        found = found.masked_fill(hidden, -torch.inf)
    return found


def attend(query: Tensor, key: Tensor, value: Tensor, *of_scores: Any) -> tuple[Tensor, Tensor]:
    """Return the [..., queries, D] outputs in the type of `query`, and the [..., queries] log-sums of the scores."""
    found = scores(query, key, *of_scores)
    return (found.softmax(-1) @ value.float()).to(query.dtype), found.logsumexp(-1)


def gradients(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *of_scores: Any,
    of: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, in their types; `of` is the result of `attend`."""
    scale = scaled(query, of_scores[-1])
    out, sums = of or attend(query, key, value, *of_scores)
    weights = (scores(query, key, *of_scores) - sums[..., None]).exp()
    of_weights = upstream.float() @ value.float().transpose(-1, -2)
    of_scaled = weights * (of_weights - (upstream.float() * out.float()).sum(-1, keepdim=True)) * scale
    of_query = of_scaled @ key.float()
    of_key = of_scaled.transpose(-1, -2) @ query.float()
    of_value = weights.transpose(-1, -2) @ upstream.float()
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


# ---- one grid: aten's kernels of scaled_dot_product_attention ----


def later(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor | None:
    """Return the bias with -inf for keys after a query: torch aligns a causal mask with the first key."""
    if not is_causal:
        return bias
    mask = torch.zeros(query.shape[-2], key.shape[-2]).masked_fill(
        torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1), -torch.inf
    )
    return mask if bias is None else bias + mask


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    with_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute `aten::_scaled_dot_product_efficient_attention`; the sums are empty unless asked for."""
    assert dropout == 0.0, "dropout in attention is not written out"
    out, sums = attend(query, key, value, later(query, key, bias, is_causal), False, scale)
    seed = torch.zeros((), dtype=torch.int64)
    padded = pad(sums, (0, -sums.shape[-1] % 32), value=torch.inf)  # as the kernel's warps write them
    return out, padded if with_sums else sums[..., :0], seed, seed


def efficient_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute the gradients of `efficient`."""
    wanted, is_causal = rest[5], len(rest) > 6 and rest[6]  # an argument that is left out is false
    if wanted[3]:
        raise NotImplementedError("the gradient of the bias of attention is not written out")
    return *gradients(upstream, query, key, value, later(query, key, bias, is_causal), False, scale), None


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, *rest: Any, **more: Any
) -> tuple[Any, ...]:
    """Compute `aten::_scaled_dot_product_flash_attention`."""
    assert dropout == 0.0
    return *attend(query, key, value, None, is_causal, more.get("scale")), None, None, None, None, None, None, None


def flash_backward(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
    """Compute the gradients of `flash`."""
    is_causal = rest[7]
    return gradients(upstream, query, key, value, None, is_causal, more.get("scale"))


# ---- a row of sequences, end to end ----


def sequences(bounds: Tensor, of_keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the places of the queries and of the keys of each sequence of a row."""
    queries, keys = bounds.tolist(), of_keys.tolist()
    for place in range(len(queries) - 1):
        yield slice(queries[place], queries[place + 1]), slice(keys[place], keys[place + 1])


def by_head(tokens: Tensor, num_heads: int) -> Tensor:
    """Return [num_heads, n, D] of [n, groups, D], each group for its heads."""
    return tokens.transpose(0, 1).repeat_interleave(num_heads // tokens.shape[1], dim=0)


def outside_window(num_queries: int, num_keys: int, left: int) -> Tensor | None:
    """Return [queries, keys] -inf for keys that lie more than `left` places before a query, else 0; None if -1.

    The last query is at the place of the last key.
    """
    if left == -1:
        return None
    distances = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    return torch.zeros(num_queries, num_keys).masked_fill(distances > left, -torch.inf)


def mask_of(is_causal: bool, window: dict[str, Any]) -> tuple[int, bool]:
    """Return the keys before its own that a query sees, -1 for all, and whether it sees no later keys."""
    left, right = (window.get(f"window_size_{side}") for side in ("left", "right"))
    assert right in (None, -1, 0)
    return -1 if left is None else left, is_causal or right == 0


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    *rest: Any,
    scale: float | None = None,
    **window: Any,
) -> tuple[Any, ...]:
    """Compute `aten::_flash_attention_forward` of [n, heads, D] queries and [m, groups, D] keys and values."""
    assert dropout == 0.0
    left, hides_later = mask_of(is_causal, window)
    out, sums = torch.empty_like(query), torch.zeros(query.shape[1], query.shape[0])
    for queries, keys in sequences(bounds, key_bounds):
        parts = (by_head(part, query.shape[1]) for part in (query[queries], key[keys], value[keys]))
        hidden = outside_window(queries.stop - queries.start, keys.stop - keys.start, left)
        found, sums[:, queries] = attend(*parts, hidden, hides_later, scale)
        out[queries] = found.transpose(0, 1)
    return out, sums, None, None, None


def varlen_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    *rest: Any,
    scale: float | None = None,
    **window: Any,
) -> tuple[Tensor, ...]:
    """Compute the gradients of `varlen`."""
    left, hides_later = mask_of(is_causal, window)
    of_query, of_key, of_value = (torch.zeros_like(part) for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for queries, keys in sequences(bounds, key_bounds):
        parts = (by_head(part, query.shape[1]) for part in (upstream[queries], query[queries], key[keys], value[keys]))
        hidden = outside_window(queries.stop - queries.start, keys.stop - keys.start, left)
        found = out[queries].transpose(0, 1), sums[:, queries]
        for_query, for_key, for_value = gradients(*parts, hidden, hides_later, scale, of=found)
        of_query[queries] = for_query.transpose(0, 1)
        of_key[keys] = for_key.transpose(0, 1).unflatten(1, (-1, groups)).sum(2)
        of_value[keys] = for_value.transpose(0, 1).unflatten(1, (-1, groups)).sum(2)
    return of_query, of_key, of_value
