"""The moves of one parameter: sender, receiver and box of each transfer.

Each box comes from the nearest and least busy holder, and only boxes that a rank lacks travel. All functions are pure
functions of the holdings, so every rank computes the same moves. Moves have no names: parameters of the same shape,
cut and placed the same way (such as the layers of one pipeline stage), share their moves. So the cost of a plan grows
with the number of kinds of parameters. Moves are columns of integers, because a kind has as many moves as ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import torch

from megarl.columns import Integers
from megarl.platform.errors import UserError
from megarl.reshard.columns import count_up, starts
from megarl.reshard.layout import Box, PlacedBox, ShardedBoxes
from megarl.reshard.plan import aligned


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """All moves of one kind of parameter, or of a part of it.

    Move `i` carries box `box[i]` from place `source[i]` on rank `sender[i]` to place `destination[i]` on rank
    `reader[i]`, which may be the same rank. These columns are int64 [num_moves]. Box `b` is `lo[b] <= index < hi[b]`,
    both int64 [num_boxes, num_dims]. A place is an index into `ShardedBoxes.places` of its side.

    Example: rank 0 holds rows 0:4 of a vector, rank 1 rows 4:8; both need the full vector, that is two boxes each.

        lo, hi       0:4  4:8
        move         0  1  2  3
        box          0  0  1  1
        sender       0  0  1  1
        source       0  0  1  1
        reader       0  1  0  1
        destination  0  0  0  0
    """

    world_size: int
    itemsize: int  # bytes of an element on the wire
    lo: Integers
    hi: Integers
    box: Integers
    sender: Integers
    source: Integers
    reader: Integers
    destination: Integers

    @cached_property
    def num_bytes(self) -> Integers:
        """[num_moves]: the bytes of each move."""
        sizes: Integers = np.prod(self.hi - self.lo, axis=1, dtype=np.int64) * self.itemsize
        return sizes[self.box]

    @cached_property
    def travels(self) -> npt.NDArray[np.bool_]:
        """[num_moves]: whether the move leaves its rank."""
        return self.sender != self.reader

    @cached_property
    def load(self) -> Integers:
        """[2, world_size]: the bytes of bucket that each rank sends, and the bytes that it writes.

        A copy counts as written although it needs no bucket, because written data may be staged until the parameter is
        complete.
        """
        size = aligned(self.num_bytes)
        return np.stack([self.per_rank(self.sender, size * self.travels), self.per_rank(self.reader, size)])

    def per_rank(self, ranks: Integers, amounts: Integers) -> Integers:
        """Return [world_size]: the amounts added up by rank; exact below 2^53."""
        return np.bincount(ranks, weights=amounts, minlength=self.world_size).astype(np.int64)

    def box_of(self, move: int) -> Box:
        """Return the box that a move carries."""
        box = self.box[move]
        return Box(tuple(self.lo[box].tolist()), tuple(self.hi[box].tolist()))

    def fit(self, bucket_bytes: int) -> Iterator["Moves"]:
        """Yield the moves in parts, by cutting every box, so that no rank's load of a part exceeds the bucket.

        Each box is cut along its first dimension that can be cut, so that all ranks share in every part.

        Raises:
            UserError: a single element exceeds the bucket.
        """
        load = int(self.load.max())
        if load <= bucket_bytes:
            yield self
            return
        if (self.hi - self.lo > 1).any():
            num_parts = -(-load // bucket_bytes)
            parts = (self._part(part, num_parts) for part in range(num_parts))
            yield from (fitting for part in parts if len(part.box) for fitting in part.fit(bucket_bytes))
        elif len(self.lo) > 1:
            for half in np.array_split(np.arange(len(self.lo)), 2):
                yield from self._only(half, self.lo, self.hi).fit(bucket_bytes)
        else:
            raise UserError(f"a bucket of {bucket_bytes} bytes is too small; this exchange needs {load}")

    def _part(self, part: int, num_parts: int) -> "Moves":
        """Return part `part` of `num_parts` equal parts of each box; a part without an index is left out."""
        lo, hi = equal_parts(self.lo, self.hi, part, num_parts)
        return self._only(np.flatnonzero((lo < hi).all(axis=1)), lo, hi)

    def _only(self, boxes: Integers, lo: Integers, hi: Integers) -> "Moves":
        """Return the moves of some of the boxes, which shrink to `lo` and `hi`."""
        number = np.full(len(lo), -1)
        number[boxes] = np.arange(len(boxes))
        mine = number[self.box] >= 0
        columns = {name: getattr(self, name)[mine] for name in ("sender", "source", "reader", "destination")}
        return replace(self, lo=lo[boxes], hi=hi[boxes], box=number[self.box[mine]], **columns)


def equal_parts(
    lo: Integers, hi: Integers, part: int | Integers, num_parts: int | Integers
) -> tuple[Integers, Integers]:
    """Return the ends of one of equal parts of each box, along its first dimension that can be cut.

    `lo` and `hi` are [num_boxes, num_dims], with at least one dimension. `part` counts from 0; all boxes have the same
    `part` and `num_parts`, or each has its own, [num_boxes].
    """
    row = np.arange(len(lo))
    dim = np.argmax(hi - lo > 1, axis=1)
    start = lo[row, dim]
    extent = hi[row, dim] - start
    lo = lo.copy()
    hi = hi.copy()
    lo[row, dim] = start + extent * part // num_parts
    hi[row, dim] = start + extent * (part + 1) // num_parts
    return lo, hi


def find_moves(
    source: ShardedBoxes,
    destination: ShardedBoxes,
    *,
    itemsize: int,
    ranks_per_node: int,
    sent_before: Integers,
) -> Moves:
    """Return moves that supply every destination place from a holder of each of its elements.

    A rank supplies itself with the elements that it holds. Otherwise the least loaded holder on its node supplies it,
    and if there is none, the least loaded of all holders.

    Args:
        source: the holders.
        destination: the readers.
        itemsize: bytes of an element on the wire.
        ranks_per_node: ranks `k * ranks_per_node ..` are on node `k`.
        sent_before: [world_size], the bytes that each rank sends of other parameters. If holders cannot share the
            readers evenly, the holders that send least get one more. It decides nothing else, so that parameters with
            the same holders have the same peers.

    Raises:
        UserError: nobody holds an element of a destination place.
    """
    wanted = destination.bounds
    readers, places_read = destination.owners
    cells, holders = _cells(source, num_dims=wanted[0].shape[1])
    lo = np.maximum(cells[0][:, None], wanted[0])
    hi = np.minimum(cells[1][:, None], wanted[1])
    numel = np.prod(np.maximum(hi - lo, 0), axis=2, dtype=np.int64)  # [num_cells, num_destinations]
    _check_supplied(numel.sum(axis=0), destination.places)
    boxes = np.cumsum(numel.ravel() > 0).reshape(numel.shape) - 1
    load = np.zeros_like(sent_before)
    columns = []
    for cell, (ranks, places) in enumerate(holders):
        served = np.flatnonzero(numel[cell, places_read])
        reader = readers[served]
        place = places_read[served]
        sizes = numel[cell, place] * itemsize
        supplier = _suppliers(ranks, reader, sizes, load, sent_before, ranks_per_node=ranks_per_node)
        columns.append((boxes[cell, place], ranks[supplier], places[supplier], reader, place))
    box, sender, place, reader, place_read = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return Moves(
        world_size=len(sent_before),
        itemsize=itemsize,
        lo=lo[numel > 0],
        hi=hi[numel > 0],
        box=box,
        sender=sender,
        source=place,
        reader=reader,
        destination=place_read,
    )


def _check_supplied(supplied: Integers, destinations: Sequence[PlacedBox]) -> None:
    for num, place in zip(supplied.tolist(), destinations, strict=True):
        if num < place.box.numel:
            raise UserError(
                f"rank {place.ranks[0]} needs {place.box}, but ranks hold only {num} of its {place.box.numel} elements"
            )


def union_numel(boxes: Sequence[Box]) -> int:
    """Return the number of elements in at least one of the boxes."""
    if not boxes:
        return 0
    union = ShardedBoxes(tuple(PlacedBox(box, (0,)) for box in boxes), torch.uint8)
    (lo, hi), _ = _cells(union, num_dims=len(boxes[0].lo))
    return int(np.prod(hi - lo, axis=1).sum())


def _cells(boxes: ShardedBoxes, *, num_dims: int) -> tuple[tuple[Integers, Integers], list[tuple[Integers, Integers]]]:
    """Cut the union of the boxes along all their faces, into disjoint boxes: the cells.

    Disjoint or equal boxes, as one way of sharding makes them, are returned unchanged. For example the boxes 0:4 and
    2:6 give the cells 0:2, 2:4 and 4:6, and both places hold 2:4.

    Returns:
        the low and the high ends of the cells, both [num_cells, num_dims], and for each cell the ranks that hold it,
        ascending, and the place of each of these ranks.
    """
    if not boxes.places:
        return (np.zeros((0, num_dims), np.int64), np.zeros((0, num_dims), np.int64)), []
    lo, hi = boxes.bounds
    faces = [pairwise(sorted({*lo[:, dim].tolist(), *hi[:, dim].tolist()})) for dim in range(num_dims)]
    spans = list(product(*faces))
    ends = np.array(spans, dtype=np.int64).reshape(len(spans), num_dims, 2)
    inside = np.asarray(((lo <= ends[:, None, :, 0]) & (ends[:, None, :, 1] <= hi)).all(axis=2))  # [cells, places]
    held = np.asarray(inside.any(axis=1))
    ranks, places = boxes.owners
    holders = []
    for containing in inside[held]:
        mine = containing[places]
        of_cell, first = (
            np.unique(ranks[mine], return_index=True) if containing.sum() > 1 else (ranks[mine], slice(None))
        )
        holders.append((of_cell, places[mine][first]))
    return (ends[held, :, 0], ends[held, :, 1]), holders


def _suppliers(
    holders: Integers,
    readers: Integers,
    sizes: Integers,
    load: Integers,
    sent_before: Integers,
    *,
    ranks_per_node: int,
) -> Integers:
    """Return [num_readers], the index of the holder that supplies each reader; add what holders send to `load`.

    Three groups of readers choose in turn: readers that hold the cell supply themselves; readers with holders on their
    node (`near`) go round these holders, the largest size and the least load first; the others (`far`) are given one by
    one to the least loaded holder. All columns with `foreign` in the index are of readers that do not hold the cell.
    """
    supplier = np.minimum(np.searchsorted(holders, readers), len(holders) - 1)
    foreign: Integers = np.flatnonzero(holders[supplier] != readers)
    nodes = holders // ranks_per_node
    node = readers[foreign] // ranks_per_node
    first = np.searchsorted(nodes, node)
    num_near: Integers = np.asarray(np.searchsorted(nodes, node, side="right") - first)
    near: npt.NDArray[np.bool_] = num_near > 0
    if num_near.any():
        by_load = np.lexsort((sent_before[holders], load[holders], nodes))
        order = np.flatnonzero(near)[np.lexsort((-sizes[foreign[near]], node[near]))]
        turn = np.arange(len(order)) - np.searchsorted(node[order], node[order])
        supplier[foreign[order]] = by_load[first[order] + turn % num_near[order]]
        np.add.at(load, holders[supplier[foreign[order]]], sizes[foreign[order]])
    # Far readers choose last, because they can avoid holders that are busy with their own node.
    far = foreign[~near]
    if far.size:
        far = far[np.lexsort((readers[far], -sizes[far]))]
        supplier[far] = _least_loaded(load[holders], sent_before[holders], int(sizes[far].sum()) // len(far), len(far))
        np.add.at(load, holders[supplier[far]], sizes[far])
    return supplier


def _least_loaded(load: Integers, sent_before: Integers, size: int, num: int) -> Integers:
    """Return [num], the holder of each of `num` boxes of `size` bytes if the least loaded holder always takes the next.

    Closed form of a loop. Loads are counted in boxes (`level`) and filled up to a common height. Example: levels 0, 2
    and 5, and `num` = 4. The third holder gets its first box only after `below` = 0, 2, 8 boxes, so it gets none
    (`served` = 2). The other two fill up to `height` = (4 + 2) / 2 = 3: 3 boxes for the first holder and 1 for the
    second, in the order of levels and then of holders: 0, 0, 0 and 1.
    """
    level = load // size  # counted in boxes
    order = np.lexsort((sent_before, load))
    level = level[order]
    below = np.arange(len(level)) * level - starts(level)  # boxes that are given before each holder gets its first
    served = int(np.searchsorted(below, num))
    order = order[:served]
    level = level[:served]
    height, rest = divmod(num + int(level.sum()), served)
    counts = height - level
    counts[:rest] += 1
    holder = np.repeat(order, counts)
    turn = count_up(counts) + np.repeat(level, counts)  # the level of the holders that take each box
    return holder[np.lexsort((holder, turn))]
