"""Turns two sets of layouts into what each rank copies, sends and receives, wave by wave.

The plan is a pure function of the layouts of all ranks, so every rank computes its own without a message. It is proven
before it is handed out: every destination element is written exactly once. A rank receives exactly what it needs and
does not hold, and in no wave does a rank send or write more than a bucket.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.reshard.layout import Box, Layout, Piece
from megarl.reshard.plan import Copy, RankPlan, Transfer, Wave
from megarl.reshard.proof import check_plan
from megarl.reshard.routes import Place, Routes, find_routes


def make_plan(
    sources: Sequence[Layout],
    destinations: Sequence[Layout],
    *,
    rank: int,
    ranks_per_node: int,
    bucket_bytes: int,
    order: Sequence[str] | None = None,
) -> RankPlan:
    """The proven plan of one rank; see `Schedule` for the arguments and errors."""
    schedule = Schedule(sources, destinations, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes, order=order)
    plan = schedule.plan(rank)
    check_plan(plan, destinations[rank])
    return plan


class Schedule:
    """The plan of the whole world: in which wave which parts of which parameters travel along which routes.

    Args:
        sources: what each rank holds; ranks that hold the same may share one object, which saves time.
        destinations: what each rank must hold afterwards; rank by rank as in `sources`.
        ranks_per_node: ranks `k * ranks_per_node ..` are on node `k`.
        bucket_bytes: the most that any rank sends, and the most that it receives, in one wave.
        order: the names of the parameters in the order in which they travel. By default they come in the order of the
            destinations, with the parameters of different owners (pipeline stages) interleaved, so that all ranks send.

    Raises:
        ValueError: a destination needs what nobody holds, or the bucket is too small.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        destinations: Sequence[Layout],
        *,
        ranks_per_node: int,
        bucket_bytes: int,
        order: Sequence[str] | None = None,
    ) -> None:
        assert len(sources) == len(destinations)
        self.world_size = len(sources)
        self._sources, self._destinations = _Side(sources), _Side(destinations)
        self._ranks_per_node = ranks_per_node
        self._bucket_bytes = bucket_bytes
        self._known_routes: dict[Hashable, list[Routes]] = {}
        self.waves: list[list[tuple[str, Routes]]] = []
        load = np.zeros((2, self.world_size), dtype=np.int64)
        for name in order or self._interleaved():
            for routes in self._routes(name):
                load = load + routes.load
                if not self.waves or load.max() > bucket_bytes:
                    self.waves.append([])
                    load = routes.load
                self.waves[-1].append((name, routes))

    def plan(self, rank: int) -> RankPlan:
        """What `rank` does."""
        held, needed = self._sources.pieces(rank), self._destinations.pieces(rank)
        waves = []
        for entries in self.waves:
            wave = Wave()
            for name, routes in entries:
                dtype = self._wire_dtype(name)
                for route in routes.by_rank.get(rank, ()):
                    if route.source_rank == rank:
                        source = held[name, route.source].part(route.box)
                    if route.destination_rank == rank:
                        destination = needed[name, route.destination].part(route.box)
                    if route.source_rank == route.destination_rank:
                        wave.copies.append(Copy(source, destination))
                    elif route.source_rank == rank:
                        wave.sends.append(Transfer(source, route.destination_rank, dtype))
                    else:
                        wave.receives.append(Transfer(destination, route.source_rank, dtype))
            waves.append(wave)
        return RankPlan(rank, self.world_size, waves)

    def traffic(self) -> npt.NDArray[np.int64]:
        """[2, world_size]: the bytes that each rank sends and receives, without the buckets' padding."""
        total = np.zeros((2, self.world_size), dtype=np.int64)
        for wave in self.waves:
            for name, routes in wave:
                total += routes.traffic * self._wire_dtype(name).itemsize
        return total

    def _wire_dtype(self, name: str) -> torch.dtype:
        """The smaller type of both ends, so that a cast happens where it saves bytes."""
        return min(self._destinations.dtypes[name], self._sources.dtypes[name], key=lambda dtype: dtype.itemsize)

    def _routes(self, name: str) -> list[Routes]:
        """The routes of a parameter, in parts that fit the bucket; computed once for all parameters placed alike."""
        sources, destinations = self._sources.places.get(name, ()), self._destinations.places[name]
        itemsize = self._wire_dtype(name).itemsize if sources else 1
        kind = (sources, destinations, itemsize)
        if kind not in self._known_routes:
            try:
                found = find_routes(sources, destinations, ranks_per_node=self._ranks_per_node)
                routes = Routes(found, world_size=self.world_size, itemsize=itemsize)
                self._known_routes[kind] = list(routes.fit(self._bucket_bytes))
            except ValueError as fault:
                raise ValueError(f"cannot reshard {name}: {fault}") from None
        return self._known_routes[kind]

    def _interleaved(self) -> list[str]:
        by_owners: dict[Hashable, list[str]] = defaultdict(list)
        for name in self._destinations.places:
            owners = frozenset(rank for _, ranks in self._sources.places.get(name, ()) for rank in ranks)
            by_owners[owners].append(name)
        progress = {
            name: (position + 0.5) / len(names) for names in by_owners.values() for position, name in enumerate(names)
        }
        return sorted(progress, key=progress.__getitem__)


class _Side:
    """The layouts of one side, turned from pieces by rank into places by parameter."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self.dtypes: dict[str, torch.dtype] = {}
        ranks_by_place: dict[str, dict[tuple[Box, int], list[int]]] = defaultdict(dict)
        for layout, ranks in _distinct(layouts):
            for piece, copy in _numbered(layout):
                ranks_by_place[piece.name].setdefault((piece.box, copy), []).extend(ranks)
                if self.dtypes.setdefault(piece.name, piece.dtype) != piece.dtype:
                    other = self.dtypes[piece.name]
                    raise ValueError(f"{piece.name} is {piece.dtype} on rank {ranks[0]} and {other} on an earlier rank")
        self.places: Mapping[str, tuple[Place, ...]] = {
            name: tuple((box, tuple(sorted(ranks))) for (box, _), ranks in places.items())
            for name, places in ranks_by_place.items()
        }
        self._index = {
            (name, *key): index for name, places in ranks_by_place.items() for index, key in enumerate(places)
        }

    def pieces(self, rank: int) -> dict[tuple[str, int], Piece]:
        """The pieces of a rank by parameter and index of their place."""
        return {
            (piece.name, self._index[piece.name, piece.box, copy]): piece
            for piece, copy in _numbered(self._layouts[rank])
        }


def _distinct(layouts: Sequence[Layout]) -> list[tuple[Layout, list[int]]]:
    """The different layouts, each with the ranks that have it."""
    by_object: dict[int, list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        by_object[id(layout)].append(rank)
    by_value: dict[tuple[Piece, ...], list[int]] = defaultdict(list)
    for ranks in by_object.values():
        by_value[tuple(layouts[ranks[0]])].extend(ranks)
    return list(by_value.items())


def _numbered(layout: Layout) -> Iterator[tuple[Piece, int]]:
    """The pieces of a layout, each with the number of earlier pieces of the same box."""
    seen: Counter[tuple[str, Box]] = Counter()
    for piece in layout:
        yield piece, seen[piece.name, piece.box]
        seen[piece.name, piece.box] += 1
