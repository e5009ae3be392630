"""Who sends which box of one parameter to whom: the least that must travel, from the nearest and least busy holder.

Everything here is a pure function of who holds and who needs which boxes, the same for every rank that computes it. It
knows no names: parameters of the same shape, cut and placed the same way (the layers of one pipeline stage) share their
routes, so a plan costs as much as there are kinds of parameters, not parameters.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from megarl.reshard.layout import Box

ALIGNMENT = 16  # bytes: where a box may begin in a bucket, so that any dtype can be viewed and copied in wide words

Place = tuple[Box, tuple[int, ...]]  # a box of the parameter and the ranks that have it, ascending


@dataclass(frozen=True, slots=True)
class Route:
    """`box` goes from one rank's place to another's, or from a rank to itself."""

    box: Box
    source_rank: int
    source: int  # which of the source places
    destination_rank: int
    destination: int  # which of the destination places


class Routes:
    """All routes of one parameter, or of a part of it, and what they cost each rank.

    `traffic` is [2, world_size]: the elements that each rank sends and receives.
    `load` is [2, world_size]: the bytes of bucket that each rank sends, and the bytes that it writes. A copy counts as
    written, although it needs no bucket, because what is written may be staged until its parameter is complete.
    """

    def __init__(self, routes: Sequence[Route], *, world_size: int, itemsize: int) -> None:
        self._routes = routes
        self._itemsize = itemsize
        self.traffic: npt.NDArray[np.int64] = np.zeros((2, world_size), dtype=np.int64)
        self.load: npt.NDArray[np.int64] = np.zeros((2, world_size), dtype=np.int64)
        self.by_rank: dict[int, list[Route]] = defaultdict(list)
        for route in routes:
            size = aligned(route.box.numel * itemsize)
            self.load[1, route.destination_rank] += size
            self.by_rank[route.destination_rank].append(route)
            if route.source_rank != route.destination_rank:
                self.load[0, route.source_rank] += size
                self.traffic[0, route.source_rank] += route.box.numel
                self.traffic[1, route.destination_rank] += route.box.numel
                self.by_rank[route.source_rank].append(route)

    def fit(self, bucket_bytes: int) -> Iterator["Routes"]:
        """Cut the parameter in halves, along its first dimension, until no rank's load exceeds the bucket.

        Raises:
            ValueError: a single element is too much.
        """
        if self.load.max() <= bucket_bytes:
            yield self
            return
        lo = tuple(map(min, zip(*(route.box.lo for route in self._routes), strict=True)))
        hi = tuple(map(max, zip(*(route.box.hi for route in self._routes), strict=True)))
        cuttable = [dim for dim, (low, high) in enumerate(zip(lo, hi, strict=True)) if high - low > 1]
        if not cuttable:
            raise ValueError(f"a bucket of {bucket_bytes} bytes is too small; this exchange needs {self.load.max()}")
        dim = cuttable[0]
        middle = (lo[dim] + hi[dim]) // 2
        for half in (
            Box(lo, (*hi[:dim], middle, *hi[dim + 1 :])),
            Box((*lo[:dim], middle, *lo[dim + 1 :]), hi),
        ):
            inside = [replace(route, box=box) for route in self._routes if (box := route.box.intersect(half))]
            part = Routes(inside, world_size=self.load.shape[1], itemsize=self._itemsize)
            yield from part.fit(bucket_bytes)


def aligned(num_bytes: int) -> int:
    """The bucket space of a box of so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def find_routes(sources: Sequence[Place], destinations: Sequence[Place], *, ranks_per_node: int) -> list[Route]:
    """Supply every destination place from a holder of each of its elements.

    A rank supplies itself with what it holds; else the least loaded holder on its node does, else the least of all.

    Raises:
        ValueError: some element of a destination place is held by nobody.
    """
    routes = []
    load: dict[int, int] = defaultdict(int)
    num_supplied = [0] * len(destinations)
    for cell, overlapping in _cells([box for box, _ in sources]):
        holders: dict[int, int] = {}
        for source in overlapping:
            for rank in sources[source][1]:
                holders.setdefault(rank, source)
        wanted = []
        for destination, (box, readers) in enumerate(destinations):
            if part := cell.intersect(box):
                num_supplied[destination] += part.numel
                wanted += [(part, reader, destination) for reader in readers]
        demands = [(reader, part.numel) for part, reader, _ in wanted]
        suppliers = _suppliers(sorted(holders), demands, load, ranks_per_node=ranks_per_node)
        for (part, reader, destination), supplier in zip(wanted, suppliers, strict=True):
            routes.append(Route(part, supplier, holders[supplier], reader, destination))
    for supplied, (box, readers) in zip(num_supplied, destinations, strict=True):
        if supplied < box.numel:
            raise ValueError(
                f"rank {readers[0]} needs {box}, of which {supplied} of {box.numel} elements are held anywhere"
            )
    return routes


def _cells(boxes: Sequence[Box]) -> Iterator[tuple[Box, list[int]]]:
    """Cut the union of the boxes along all their faces: disjoint boxes, each with the boxes that contain it.

    Boxes that are disjoint or equal, as those of one way of sharding are, come back as they are.
    """
    if not boxes:
        return
    faces = [
        pairwise(sorted({face for box in boxes for face in (box.lo[dim], box.hi[dim])}))
        for dim in range(len(boxes[0].lo))
    ]
    for spans in product(*faces):
        cell = Box(tuple(low for low, _ in spans), tuple(high for _, high in spans))
        if containing := [index for index, box in enumerate(boxes) if box.contains(cell)]:
            yield cell, containing


def _suppliers(
    holders: Sequence[int], demands: Sequence[tuple[int, int]], load: dict[int, int], *, ranks_per_node: int
) -> list[int]:
    """The holder that supplies each `(reader, size)`; adds what they send to `load`."""
    near: dict[int, list[int]] = defaultdict(list)
    for holder in holders:
        near[holder // ranks_per_node].append(holder)
    own = set(holders)
    suppliers = [-1] * len(demands)
    far = []
    for index, (reader, size) in enumerate(demands):
        if reader in own:
            suppliers[index] = reader
        elif neighbours := near.get(reader // ranks_per_node):
            suppliers[index] = min(neighbours, key=lambda holder: load[holder])
            load[suppliers[index]] += size
        else:
            far.append(index)
    # Readers without a holder on their node choose last: they can avoid the holders whose own node keeps them busy.
    heap = [(load[holder], holder) for holder in holders]
    heapq.heapify(heap)
    for index in far:
        busy, supplier = heap[0]
        suppliers[index] = supplier
        load[supplier] = busy + demands[index][1]
        heapq.heapreplace(heap, (load[supplier], supplier))
    return suppliers
