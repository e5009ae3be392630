"""Triton kernels for `megarl.learner.norm`: they read and write each number once, and torch six times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Numbers that a program holds at once, if a row is not longer."""
PROGRAMS = 512
"""Programs of the backward pass at most. A constant, so that no sum depends on the device."""


def normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised [..., n] `x`, and 1 / rms(x) in float32 for each row."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        tile, width, warps = _tile(rows.shape[1])
        sizes = len(rows), rows.shape[1], eps, tile, width
        grid = (triton.cdiv(len(rows), tile),)
        normalised_rows[grid](rows, rows.stride(0), weight, out, scale, *sizes, num_warps=warps)
    return out.view(x.shape), scale


def gradients(x: Tensor, weight: Tensor, scale: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `weight`."""
    rows = _rows(x)
    of_out = _rows(gradient)
    of_rows = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    tile, width, warps = _tile(rows.shape[1])
    num_programs = min(PROGRAMS, triton.cdiv(len(rows), tile))
    of_weight = torch.empty(num_programs, rows.shape[1], dtype=torch.float32, device=x.device)
    if num_programs:
        strides = rows.stride(0), of_out.stride(0)
        sizes = num_programs, len(rows), rows.shape[1], tile, width
        of_each = weight, scale, of_rows, of_weight
        gradient_rows[(num_programs,)](rows, of_out, *strides, *of_each, *sizes, num_warps=warps)
    return of_rows.view(x.shape), of_weight.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    """Return [..., n] as rows whose numbers lie side by side; a transposed or expanded tensor is copied."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(num_columns: int) -> tuple[int, int, int]:
    """Return how many rows and columns a program holds, powers of two, and the warps whose registers have room."""
    width = triton.next_power_of_2(num_columns)
    return max(TILE // width, 1), width, 8 if width <= TILE else 16


@triton.jit
def normalised_rows(  # type: ignore[no-untyped-def]
    x, stride, weight, out, scale, num_rows, num_columns, eps, tile: tl.constexpr, width: tl.constexpr
):
    """Write some rows. A number is rounded before it is multiplied by its weight, as torch and vLLM round it."""
    rows = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    columns = tl.arange(0, width)
    is_row = rows < num_rows
    inside = is_row[:, None] & (columns < num_columns)[None, :]
    values = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    of_rows = 1.0 / tl.sqrt(tl.sum(values * values, 1) / num_columns + eps)
    weights = tl.load(weight + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    rounded = (values * of_rows[:, None]).to(out.dtype.element_ty).to(tl.float32)
    found = (rounded * weights[None, :]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * num_columns + columns[None, :], found, mask=inside)
    tl.store(scale + rows, of_rows, mask=is_row)


@triton.jit
def gradient_rows(  # type: ignore[no-untyped-def]
    x,
    of_out,
    stride,
    of_out_stride,
    weight,
    scale,
    of_x,
    of_weight,
    num_programs,
    num_rows,
    num_columns,
    tile: tl.constexpr,
    width: tl.constexpr,
):
    """Write the gradients of every `num_programs`-th tile of rows, and what these add to that of the weight."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    is_column = columns < num_columns
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros([width], dtype=tl.float32)
    for first in range(program * tile, num_rows, num_programs * tile):
        rows = first + tl.arange(0, tile)
        inside = (rows < num_rows)[:, None] & is_column[None, :]
        values = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        slopes = tl.load(of_out + rows[:, None] * of_out_stride + columns[None, :], mask=inside, other=0.0)
        of_rows = tl.load(scale + rows, mask=rows < num_rows, other=0.0)[:, None]
        total += tl.sum(slopes.to(tl.float32) * (values * of_rows).to(of_x.dtype.element_ty).to(tl.float32), 0)
        weighted = (slopes.to(tl.float32) * weights[None, :]).to(of_x.dtype.element_ty).to(tl.float32)
        mean = (tl.sum(weighted * values, 1) / num_columns)[:, None]
        found = weighted * of_rows - values * (mean * of_rows * of_rows * of_rows)
        tl.store(of_x + rows[:, None] * num_columns + columns[None, :], found.to(of_x.dtype.element_ty), mask=inside)
    tl.store(of_weight + program * num_columns + columns, total, mask=is_column)
