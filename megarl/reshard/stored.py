"""Tensors in files of weights: a rank reads boxes of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.platform.errors import UserError
from megarl.reshard.headers import FLOATS, Shape
from megarl.reshard.layout import Box
from megarl.reshard.quantised import MXFP4_SIZE, Block, mxfp4_shape, not_plain
from megarl.reshard.wrapped import TextPlace

DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))

ROWS = 1024  # of a matrix in MXFP4, or with a scale for each row, that are read at a time
MXFP4_BIAS = 127  # of an exponent
MXFP4_NUMBERS = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
MXFP4_PAIRS = torch.tensor([(MXFP4_NUMBERS[byte % 16], MXFP4_NUMBERS[byte // 16]) for byte in range(256)])
"""[256, 2], the two numbers of a byte: its lower four bits come first."""


class StoredTensor(Protocol):
    """A tensor in an open file."""

    shape: Shape
    dtype: torch.dtype
    """Of what is read."""

    def read(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Yield parts that add up to the box, each with its numbers."""
        ...


class PlainTensor:
    """A tensor that is stored in floats."""

    def __init__(self, name: str, numbers: Any) -> None:
        """Take a lazy slice of safetensors. Raises UserError if its dtype is no plain float."""
        kind = numbers.get_dtype()
        if kind not in DTYPES:
            raise UserError(f"{name} is stored as {kind}; {not_plain()}")
        self.shape = tuple(numbers.get_shape())
        self.dtype = DTYPES[kind]
        self._numbers = numbers

    def read(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Yield the box."""
        yield box, self._numbers[_index(box)]


@dataclass(frozen=True)
class ExpertSlice:
    """The matrix of one expert, as a lazy slice, in a lazy slice of the matrices of all experts."""

    numbers: Any  # the matrices [experts, rows, columns]
    place: TextPlace  # of the matrix in them

    def get_dtype(self) -> str:
        """Return the dtype in the notation of safetensors."""
        return self.place.tensor.dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return list(self.place.tensor.shape)

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """Return a box of the matrix."""
        rows, columns = index
        expert = self.place.expert or 0
        row = self.place.row
        numbers: Tensor = self.numbers[expert : expert + 1, row + rows.start : row + rows.stop, columns]
        return numbers[0]


class Fp8Matrix:
    """A matrix that is stored in FP8. Reads the numbers of a box, and the scales of the blocks it touches."""

    dtype = torch.float32

    def __init__(self, numbers: Any, scales: Any, block: Block) -> None:
        """Take lazy slices of safetensors, whose shapes fit together."""
        self.shape = tuple(numbers.get_shape())
        self._numbers = numbers
        self._scales = scales
        self._block = block

    def read(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Yield the box by rows of blocks, or by many rows that have a scale each, dequantised in float32."""
        size = self._block
        width = size.columns or self.shape[1]
        top, left = box.lo
        bottom, right = box.hi
        rows = range(top // size.rows, -(-bottom // size.rows))
        columns = range(left // width, -(-right // width))
        factors = self._scales[rows.start : rows.stop, columns.start : columns.stop].float()
        if len(columns) > 1:
            first = left - columns.start * width
            factors = factors.repeat_interleave(width, dim=1)[:, first : first + right - left]
        step = ROWS if size.rows == 1 else 1
        for row in rows[::step]:
            end = min(row + step, rows.stop)
            part = Box((max(top, row * size.rows), left), (min(bottom, end * size.rows), right))
            yield part, self._numbers[_index(part)].float() * factors[row - rows.start : end - rows.start]


class Mxfp4Experts:
    """The transposed matrices of all experts in MXFP4. Reads the numbers of a box and their scales."""

    dtype = torch.bfloat16

    def __init__(self, blocks: Any, scales: Any) -> None:
        """Take lazy slices of safetensors, whose shapes fit together."""
        self.shape: Shape = mxfp4_shape(tuple(blocks.get_shape()))
        self._blocks = blocks
        self._scales = scales

    def read(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Yield the box by experts and, of an expert, by some rows of its matrix."""
        first, top, left = box.lo
        last, bottom, right = box.hi
        groups = slice(top // MXFP4_SIZE, -(-bottom // MXFP4_SIZE))
        begin = top - groups.start * MXFP4_SIZE
        for expert in range(first, last):
            for row in range(left, right, ROWS):
                rows = slice(row, min(row + ROWS, right))
                pairs = MXFP4_PAIRS[self._blocks[expert : expert + 1, rows, groups].int()]  # [1, rows, groups, 16, 2]
                exponents = self._scales[expert : expert + 1, rows, groups].int() - MXFP4_BIAS
                numbers = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2).to(self.dtype)
                part = Box((expert, top, rows.start), (expert + 1, bottom, rows.stop))
                yield part, numbers[..., begin : begin + bottom - top].transpose(1, 2)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))
