"""Who sends which box of one parameter to whom: the least that must travel, from the nearest and least busy holder.

Everything here is a pure function of who holds and who needs which boxes, the same for every rank that computes it. It
knows no names: parameters of the same shape, cut and placed the same way (the layers of one pipeline stage), share
their routes, so a plan costs as much as there are kinds of parameters, not parameters. Routes are columns of integers,
never objects: one kind has as many of them as there are ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import torch

from megarl.reshard.layout import Box, Holding, Integers, Place
from megarl.reshard.plan import aligned


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """All routes of one kind of parameter, or of a part of it.

    Route `i` takes box `box[i]` from place `source[i]` on rank `sender[i]` to place `destination[i]` on rank
    `reader[i]`, which may be the same rank. All columns are int64 [num_routes]; box `b` is `lo[b] <= index < hi[b]`,
    both int64 [num_boxes, num_dims].
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
        """[num_routes]: what each route carries."""
        sizes: Integers = np.prod(self.hi - self.lo, axis=1, dtype=np.int64) * self.itemsize
        return sizes[self.box]

    @cached_property
    def travels(self) -> npt.NDArray[np.bool_]:
        """[num_routes]: whether it leaves its rank."""
        return self.sender != self.reader

    @cached_property
    def load(self) -> Integers:
        """[2, world_size]: the bytes of bucket that each rank sends, and the bytes that it writes.

        A copy counts as written, although it needs no bucket, because what is written may be staged until its
        parameter is complete.
        """
        size = aligned(self.num_bytes)
        return np.stack([self.per_rank(self.sender, size * self.travels), self.per_rank(self.reader, size)])

    def per_rank(self, ranks: Integers, amounts: Integers) -> Integers:
        """[world_size]: the amounts added up by rank; exact below 2^53."""
        return np.bincount(ranks, weights=amounts, minlength=self.world_size).astype(np.int64)

    def box_of(self, route: int) -> Box:
        """The box that a route carries."""
        box = self.box[route]
        return Box(tuple(self.lo[box].tolist()), tuple(self.hi[box].tolist()))

    def fit(self, bucket_bytes: int) -> Iterator["Routes"]:
        """Cut every box in as many parts as it takes for no rank's load to exceed the bucket.

        Each box is cut along its own first dimension, so that all ranks take their share in every part.

        Raises:
            ValueError: a single element is too much.
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
            raise ValueError(f"a bucket of {bucket_bytes} bytes is too small; this exchange needs {load}")

    def _part(self, part: int, num_parts: int) -> "Routes":
        """The given one of equal parts of each box, as far as its indices can be divided."""
        extents = self.hi - self.lo
        lo, hi = self.lo.copy(), self.hi.copy()
        if extents.size:
            row, dim = np.arange(len(lo)), np.argmax(extents > 1, axis=1)
            lo[row, dim] += extents[row, dim] * part // num_parts
            hi[row, dim] = self.lo[row, dim] + extents[row, dim] * (part + 1) // num_parts
        return self._only(np.flatnonzero((lo < hi).all(axis=1)), lo, hi)

    def _only(self, boxes: Integers, lo: Integers, hi: Integers) -> "Routes":
        """The routes of some of the boxes, which shrink to `lo` and `hi`."""
        number = np.full(len(lo), -1)
        number[boxes] = np.arange(len(boxes))
        mine = number[self.box] >= 0
        columns = {name: getattr(self, name)[mine] for name in ("sender", "source", "reader", "destination")}
        return replace(self, lo=lo[boxes], hi=hi[boxes], box=number[self.box[mine]], **columns)


def find_routes(
    source: Holding,
    destination: Holding,
    *,
    itemsize: int,
    ranks_per_node: int,
    sent_before: Integers,
) -> Routes:
    """Supply every destination place from a holder of each of its elements.

    A rank supplies itself with what it holds; else the least loaded holder on its node does, else the least of all.

    Args:
        source: who holds what.
        destination: who needs what.
        itemsize: bytes of an element on the wire.
        ranks_per_node: ranks `k * ranks_per_node ..` are on node `k`.
        sent_before: [world_size], the bytes that each rank sends of other parameters. Where holders cannot share the
            readers evenly, those that send least get one more. It decides nothing else, so that parameters with the
            same holders find the same peers.

    Raises:
        ValueError: some element of a destination place is held by nobody.
    """
    wanted, (readers, places_read) = destination.bounds, destination.owners
    cells, holders = _cells(source, num_dims=wanted[0].shape[1])
    lo, hi = np.maximum(cells[0][:, None], wanted[0]), np.minimum(cells[1][:, None], wanted[1])
    numel = np.prod(np.maximum(hi - lo, 0), axis=2, dtype=np.int64)  # [num_cells, num_destinations]
    _check_supplied(numel.sum(axis=0), destination.places)
    boxes = np.cumsum(numel.ravel() > 0).reshape(numel.shape) - 1
    load = np.zeros_like(sent_before)
    columns = []
    for cell, (ranks, places) in enumerate(holders):
        served = np.flatnonzero(numel[cell, places_read])
        reader, place = readers[served], places_read[served]
        sizes = numel[cell, place] * itemsize
        supplier = _suppliers(ranks, reader, sizes, load, sent_before, ranks_per_node=ranks_per_node)
        columns.append((boxes[cell, place], ranks[supplier], places[supplier], reader, place))
    box, sender, place, reader, place_read = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return Routes(
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


def _check_supplied(supplied: Integers, destinations: Sequence[Place]) -> None:
    for num, place in zip(supplied.tolist(), destinations, strict=True):
        if num < place.box.numel:
            raise ValueError(
                f"rank {place.ranks[0]} needs {place.box}, of which {num} of {place.box.numel} elements are held "
                "anywhere"
            )


def union_numel(boxes: Sequence[Box]) -> int:
    """The number of elements in at least one of the boxes."""
    if not boxes:
        return 0
    union = Holding(tuple(Place(box, (0,)) for box in boxes), torch.uint8)
    (lo, hi), _ = _cells(union, num_dims=len(boxes[0].lo))
    return int(np.prod(hi - lo, axis=1).sum())


def _cells(holding: Holding, *, num_dims: int) -> tuple[tuple[Integers, Integers], list[tuple[Integers, Integers]]]:
    """Cut the union of the boxes along all their faces, into disjoint boxes.

    Boxes that are disjoint or equal, as those of one way of sharding are, come back as they are.

    Returns:
        the cells' low and high ends, both [num_cells, num_dims], and for each cell the ranks that hold it, ascending,
        with the place in which each of them does.
    """
    if not holding.places:
        return (np.zeros((0, num_dims), np.int64), np.zeros((0, num_dims), np.int64)), []
    lo, hi = holding.bounds
    faces = [pairwise(sorted({*lo[:, dim].tolist(), *hi[:, dim].tolist()})) for dim in range(num_dims)]
    spans = list(product(*faces))
    ends = np.array(spans, dtype=np.int64).reshape(len(spans), num_dims, 2)
    inside = np.asarray(((lo <= ends[:, None, :, 0]) & (ends[:, None, :, 1] <= hi)).all(axis=2))  # [cells, places]
    held = np.asarray(inside.any(axis=1))
    ranks, places = holding.owners
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
    """[num_readers]: which of the holders supplies each reader; adds what they send to `load`."""
    supplier = np.minimum(np.searchsorted(holders, readers), len(holders) - 1)
    foreign: Integers = np.flatnonzero(holders[supplier] != readers)
    nodes, node = holders // ranks_per_node, readers[foreign] // ranks_per_node
    first = np.searchsorted(nodes, node)
    num_near: Integers = np.asarray(np.searchsorted(nodes, node, side="right") - first)
    near: npt.NDArray[np.bool_] = num_near > 0
    if num_near.any():
        by_load = np.lexsort((sent_before[holders], load[holders], nodes))
        order = np.flatnonzero(near)[np.lexsort((-sizes[foreign[near]], node[near]))]
        turn = np.arange(len(order)) - np.searchsorted(node[order], node[order])
        supplier[foreign[order]] = by_load[first[order] + turn % num_near[order]]
        np.add.at(load, holders[supplier[foreign[order]]], sizes[foreign[order]])
    # Readers without a holder on their node choose last: they can avoid the holders whose own node keeps them busy.
    far = foreign[~near]
    if far.size:
        far = far[np.lexsort((readers[far], -sizes[far]))]
        supplier[far] = _least_loaded(load[holders], sent_before[holders], int(sizes[far].sum()) // len(far), len(far))
        np.add.at(load, holders[supplier[far]], sizes[far])
    return supplier


def _least_loaded(load: Integers, sent_before: Integers, size: int, num: int) -> Integers:
    """[num]: which holder sends, if `num` boxes of `size` bytes are given one by one to the least loaded holder."""
    level = load // size  # counted in boxes
    order = np.lexsort((sent_before, load))
    level = level[order]
    below = np.arange(len(level)) * level - (np.cumsum(level) - level)  # boxes given before each holder gets its first
    served = int(np.searchsorted(below, num))
    order, level = order[:served], level[:served]
    height, rest = divmod(num + int(level.sum()), served)
    counts = height - level
    counts[:rest] += 1
    holder = np.repeat(order, counts)
    turn = np.arange(num) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(level, counts)
    return holder[np.lexsort((holder, turn))]
