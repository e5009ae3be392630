"""The common description of trainer, engine and files: boxes of logical Hugging Face parameters.

A `Piece` states that a strided view of a local tensor holds a box of a Hugging Face parameter. A `Layout` is all that
one rank holds (or must hold). Fused, padded, permuted and replicated local tensors differ only in their pieces.

Example: with 8 query heads, 2 key/value groups and head size 4, Megatron's `linear_qkv.weight` of tensor-parallel rank
0 of 2 is `[4 query heads of group 0 | its key head | its value head]`, three pieces: rows 0..16 of `q_proj`, 0..4 of
`k_proj` and 0..4 of `v_proj`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import ge, le, lt, sub

import numpy as np
import torch

from megarl.columns import Integers


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open index box `lo <= index < hi` of one logical tensor."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent in every dimension."""
        return tuple(map(sub, self.hi, self.lo))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.lo, self.hi, strict=True)) + "]"

    def contains(self, other: "Box") -> bool:
        """Return whether every index of `other` is in this box."""
        return all(map(le, self.lo, other.lo)) and all(map(ge, self.hi, other.hi))

    def lowered(self, rows: int) -> "Box":
        """Return the box of the same shape that is `rows` rows further down."""
        if not rows:
            return self
        return Box((self.lo[0] + rows, *self.lo[1:]), (self.hi[0] + rows, *self.hi[1:]))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common part of two boxes of the same tensor; None if there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(map(lt, lo, hi)) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided view of local tensor `param`, of type `dtype`, that holds `box` of Hugging Face parameter `name`.

    `offset` (from the first element of the local tensor) and `stride` (per dimension of the box) count elements, as in
    `torch.Tensor.as_strided`.
    """

    name: str
    box: Box
    param: str
    offset: int
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def complete(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> "Piece":
        """Return the piece of a rank whose local tensor is the full parameter, of the same name."""
        return cls(name, whole(shape), name, 0, row_major(shape), dtype)

    def part(self, box: Box) -> "Piece":
        """Return the piece that holds only `box`, which must be inside this piece's box."""
        if box == self.box:
            return self
        shift = sum((low - mine) * step for low, mine, step in zip(box.lo, self.box.lo, self.stride, strict=True))
        return replace(self, box=box, offset=self.offset + shift)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of the piece in local tensor `tensor`, of shape `box.shape`."""
        return tensor.as_strided(self.box.shape, self.stride, tensor.storage_offset() + self.offset)


Layout = Sequence[Piece]


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a parameter, and the ranks that have it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ShardedBoxes:
    """The boxes of a parameter, the ranks that have them, and the dtype.

    Parameters of one shape that are cut and placed alike have equal holdings, and share one object to save memory. A
    holding is a key of what is computed for all of them, so its hash is computed once.
    """

    places: tuple[PlacedBox, ...]
    dtype: torch.dtype

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.places, self.dtype))

    @cached_property
    def bounds(self) -> tuple[Integers, Integers]:
        """The low and the high ends of the boxes, both [num_places, num_dims]."""
        lo = np.array([place.box.lo for place in self.places], dtype=np.int64)
        hi = np.array([place.box.hi for place in self.places], dtype=np.int64)
        return lo, hi

    @cached_property
    def owners(self) -> tuple[Integers, Integers]:
        """The ranks of all places, place after place, and for each of these ranks the number of its place."""
        ranks = np.concatenate([np.array(place.ranks, dtype=np.int64) for place in self.places])
        return ranks, np.repeat(np.arange(len(self.places)), [len(place.ranks) for place in self.places])


Placement = Mapping[str, ShardedBoxes]  # of all ranks, by Hugging Face name


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def rows_of(shape: Sequence[int], first: int, end: int) -> Box:
    """Return the box of rows `first .. end` of a tensor of this shape, complete in the other dimensions."""
    rest = shape[1:]
    return Box((first, *(0 for _ in rest)), (end, *rest))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def placement_of(layouts: Sequence[Layout]) -> Placement:
    """Return the placement that the layouts of all ranks add up to, in the order in which the names first occur.

    A rank that has a box several times is in as many places of that box.

    Raises:
        ValueError: a parameter has different types on two ranks.
    """
    dtypes: dict[str, torch.dtype] = {}
    ranks_by_place: dict[str, dict[tuple[Box, int], list[int]]] = defaultdict(dict)
    for layout, ranks in _distinct(layouts):
        copies: Counter[tuple[str, Box]] = Counter()
        for piece in layout:
            key = piece.name, piece.box
            ranks_by_place[piece.name].setdefault((piece.box, copies[key]), []).extend(ranks)
            copies[key] += 1
            if dtypes.setdefault(piece.name, piece.dtype) != piece.dtype:
                other = dtypes[piece.name]
                raise ValueError(f"{piece.name} is {piece.dtype} on rank {ranks[0]} and {other} on an earlier rank")
    alike: dict[tuple[tuple[PlacedBox, ...], torch.dtype], ShardedBoxes] = {}
    placement = {}
    for name, by_place in ranks_by_place.items():
        places = tuple(PlacedBox(box, tuple(sorted(ranks))) for (box, _), ranks in by_place.items())
        placement[name] = alike.setdefault((places, dtypes[name]), ShardedBoxes(places, dtypes[name]))
    return placement


def _distinct(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, list[int]]]:
    """Yield the different layouts, each with the ranks that have it."""
    by_value: dict[tuple[Piece, ...], list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        by_value[tuple(layout)].append(rank)
    yield from by_value.items()
