"""A Triton kernel for `megarl.learner.rotary`: it reads and writes each number once, and torch five times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 1024
"""Most pairs of a token that fit into the registers of four warps."""


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, from_neighbours: bool, to_neighbours: bool) -> Tensor:
    """Turn the pairs (a, b) of [N, heads, head_dim] numbers into (a cos - b sin, b cos + a sin).

    Args:
        x: the numbers; the last of `head_dim` that are in no pair are copied.
        cosines: [N, 1, pairs] in the dtype of `x`.
        sines: like `cosines`.
        from_neighbours: the numbers of a pair are neighbours in `x`; else they have the same place in both halves.
        to_neighbours: the same of the result.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    cosines = cosines.contiguous()
    sines = sines.contiguous()
    num_tokens, heads, head_dim = x.shape
    pairs = cosines.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        places = [steps for neighbours in (from_neighbours, to_neighbours) for steps in _steps(pairs, neighbours)]
        blocks = [triton.next_power_of_2(size) for size in (heads, pairs, max(head_dim - 2 * pairs, 1))]
        warps = 4 if blocks[0] * blocks[1] <= FEW else 8
        tensors = x, *x.stride()[:2], cosines, sines, out
        rotated_token[(num_tokens,)](*tensors, *places, heads, head_dim, pairs, *blocks, num_warps=warps)
    return out


def _steps(pairs: int, neighbours: bool) -> tuple[int, int]:
    """Return the distance between the first numbers of two pairs, and that between the two numbers of a pair."""
    return (2, 1) if neighbours else (1, pairs)


@triton.jit
def rotated_token(  # type: ignore[no-untyped-def]
    x,
    token_stride,
    head_stride,
    cosines,
    sines,
    out,
    from_step,
    from_gap,
    to_step,
    to_gap,
    num_heads,
    head_dim,
    num_pairs,
    heads_block: tl.constexpr,
    pairs_block: tl.constexpr,
    rest_block: tl.constexpr,
):
    """Write one token. The first product is rounded before the second is added, as torch rounds it."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, heads_block)[:, None]
    pairs = tl.arange(0, pairs_block)[None, :]
    inside = (heads < num_heads) & (pairs < num_pairs)
    source = x + token * token_stride + heads * head_stride
    target = out + (token * num_heads + heads) * head_dim
    a = tl.load(source + pairs * from_step, mask=inside).to(tl.float32)
    b = tl.load(source + pairs * from_step + from_gap, mask=inside).to(tl.float32)
    cos = tl.load(cosines + token * num_pairs + pairs, mask=pairs < num_pairs).to(tl.float32)
    sin = tl.load(sines + token * num_pairs + pairs, mask=pairs < num_pairs).to(tl.float32)
    first = (a * cos).to(out.dtype.element_ty).to(tl.float32) - b * sin
    second = (b * cos).to(out.dtype.element_ty).to(tl.float32) + a * sin
    tl.store(target + pairs * to_step, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + pairs * to_step + to_gap, second.to(out.dtype.element_ty), mask=inside)
    rest = 2 * num_pairs + tl.arange(0, rest_block)[None, :]
    beyond = (heads < num_heads) & (rest < head_dim)
    tl.store(target + rest, tl.load(source + rest, mask=beyond), mask=beyond)
