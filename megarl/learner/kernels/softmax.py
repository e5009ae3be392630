"""Triton kernels for `megarl.learner.softmax`: each reads a logit once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns that a program holds at once."""


def moments(logits: Tensor, targets: Tensor, *, with_entropy: bool) -> Tensor:
    """See `softmax.moments`."""
    num_rows, num_columns = logits.shape
    found = torch.empty(3 + with_entropy, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        sizes = num_rows, num_columns, with_entropy, BLOCK
        moments_of_row[(num_rows,)](logits, logits.stride(0), targets, found, *sizes)
    return found


def gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    grad_log_probs: Tensor,
    of_entropy: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """See `softmax.gradient`."""
    num_rows, num_columns = logits.shape
    grad = torch.empty(num_rows, num_columns, dtype=dtype, device=logits.device)
    if num_rows:
        of_rows = (targets, normalizer, grad_log_probs, *(of_entropy or (normalizer, normalizer)))
        per_row = [numbers.contiguous() for numbers in of_rows]  # a gradient may be one number, expanded
        grid = (num_rows, triton.cdiv(num_columns, BLOCK))
        sizes = num_columns, bool(of_entropy), BLOCK
        gradient_of_block[grid](logits, logits.stride(0), grad, *per_row, *sizes)
    return grad


@triton.jit
def moments_of_row(  # type: ignore[no-untyped-def]
    logits, stride, targets, found, num_rows, num_columns, with_entropy: tl.constexpr, block: tl.constexpr
):
    """Write the numbers of one row. The maximum grows from block to block, and the sums are scaled with it."""
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    maximum = -float("inf")
    exponentials = 0.0
    weighted = 0.0
    for start in range(0, num_columns, block):
        places = start + tl.arange(0, block)
        is_column = places < num_columns
        z = tl.load(values + places, mask=is_column, other=-float("inf"))
        larger = tl.maximum(maximum, tl.max(z, 0))
        p = tl.exp(z - larger)
        shrink = tl.exp(maximum - larger)
        exponentials = exponentials * shrink + tl.sum(p, 0)
        if with_entropy:
            weighted = weighted * shrink + tl.sum(tl.where(is_column, p * z, 0.0), 0)
        maximum = larger
    target = tl.load(targets + row)
    picked = tl.load(values + target, mask=(target >= 0) & (target < num_columns), other=0.0)
    tl.store(found + row, maximum)
    tl.store(found + num_rows + row, picked)
    tl.store(found + 2 * num_rows + row, exponentials)
    if with_entropy:
        tl.store(found + 3 * num_rows + row, weighted)


@triton.jit
def gradient_of_block(  # type: ignore[no-untyped-def]
    logits,
    stride,
    grad,
    targets,
    normalizers,
    grad_log_probs,
    entropies,
    grad_entropies,
    num_columns,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    """Write the gradient of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * block + tl.arange(0, block)
    is_column = places < num_columns
    grad_log_prob = tl.load(grad_log_probs + row)
    log_p = tl.load(logits + row * stride + places, mask=is_column, other=-1e30) - tl.load(normalizers + row)
    slope = grad_log_prob
    if with_entropy:
        slope = grad_log_prob + tl.load(grad_entropies + row) * (log_p + tl.load(entropies + row))
    value = tl.where(places == tl.load(targets + row), grad_log_prob, 0.0) - tl.exp(log_p) * slope
    tl.store(grad + row * num_columns + places, value.to(grad.dtype.element_ty), mask=is_column)
