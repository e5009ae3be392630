"""The one language of trainer, engine and files: boxes of logical Hugging Face parameters.

A `Piece` says "this strided view of my local tensor holds this box of that Hugging Face parameter". A `Layout` is all
that one rank holds (or must hold). Fused, padded, permuted and replicated local tensors differ only in their pieces.

Example: with 8 query heads, 2 key/value groups and head size 4, Megatron's `linear_qkv.weight` of tensor-parallel rank
0 of 2 is `[4 query heads of group 0 | its key head | its value head]`, three pieces: rows 0..16 of `q_proj`, 0..4 of
`k_proj` and 0..4 of `v_proj`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open index box `lo <= index < hi` of one logical tensor."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extent in every dimension."""
        return tuple(high - low for low, high in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.lo, self.hi, strict=True)) + "]"

    def contains(self, other: "Box") -> bool:
        """Whether every index of `other` is one of this box's."""
        return all(mine <= low for mine, low in zip(self.lo, other.lo, strict=True)) and all(
            high <= mine for high, mine in zip(other.hi, self.hi, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """The common part of two boxes of the same tensor, None where there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(low < high for low, high in zip(lo, hi, strict=True)) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of Hugging Face parameter `name` lives in local tensor `param`, of type `dtype`, as a strided view.

    `offset` (from the local tensor's first element) and `stride` (one per box dimension) count elements, as in
    `torch.Tensor.as_strided`.
    """

    name: str
    box: Box
    param: str
    offset: int
    stride: tuple[int, ...]
    dtype: torch.dtype

    def part(self, box: Box) -> "Piece":
        """The piece that holds only `box`, which must lie inside this piece's own."""
        shift = sum((low - mine) * step for low, mine, step in zip(box.lo, self.box.lo, self.stride, strict=True))
        return replace(self, box=box, offset=self.offset + shift)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's elements in local tensor `tensor`, of shape `box.shape`."""
        return tensor.as_strided(self.box.shape, self.stride, tensor.storage_offset() + self.offset)


Layout = Sequence[Piece]


def whole(shape: Sequence[int]) -> Box:
    """The box of a full tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
