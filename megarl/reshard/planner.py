"""Turns two placements into what each rank copies, sends and receives, wave by wave.

The plan is a pure function of the placements, so every rank computes its own without a message. It is proven before it
is handed out: every destination element is written exactly once. A rank receives exactly what it needs and does not
hold, and in no wave does a rank send or write more than a bucket.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from megarl.reshard.layout import Box, Holding, Integers, Layout, Placement, placement_of
from megarl.reshard.plan import DELAY, RankPlan, Template
from megarl.reshard.proof import check_plan
from megarl.reshard.routes import Routes, find_routes, union_numel
from megarl.reshard.two_level import two_hops
from megarl.reshard.waves import cut_waves

Times = npt.NDArray[np.float64]


def make_plan(
    source: Placement,
    destination: Placement,
    *,
    held: Layout,
    needed: Layout,
    rank: int,
    world_size: int,
    ranks_per_node: int,
    bucket_bytes: int,
    two_level: bool = False,
) -> RankPlan:
    """The proven plan of one rank.

    Args:
        source: who holds what.
        destination: who must hold what afterwards.
        held: the rank's own local tensors on the source's side.
        needed: those on the destination's side.
        rank: whose plan it is.
        world_size: number of ranks.
        ranks_per_node: ranks `k * ranks_per_node ..` are on node `k`.
        bucket_bytes: the most that any rank sends, and the most that it writes, in one wave.
        two_level: whether what several ranks of a node need from outside comes to one of them, which passes it on.

    Raises:
        ValueError: a destination needs what nobody holds, the bucket is too small, or the rank's own layouts are not
            what the placements say of it.
    """
    schedule = TransferSchedule(
        source,
        destination,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        bucket_bytes=bucket_bytes,
        two_level=two_level,
    )
    plan = schedule.plan(rank, held, needed)
    check_plan(plan)
    return plan


def plan_between(
    sources: Sequence[Layout],
    destinations: Sequence[Layout],
    *,
    rank: int,
    ranks_per_node: int,
    bucket_bytes: int,
    two_level: bool = False,
) -> RankPlan:
    """The proven plan of one rank, where the layouts of all ranks are known; as `make_plan`."""
    return make_plan(
        placement_of(sources),
        placement_of(destinations),
        held=sources[rank],
        needed=destinations[rank],
        rank=rank,
        world_size=len(sources),
        ranks_per_node=ranks_per_node,
        bucket_bytes=bucket_bytes,
        two_level=two_level,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes per rank, each [world_size] int64, without the buckets' padding."""

    sent: Integers
    received: Integers
    crossing: Integers  # the part of `received` that comes from other nodes


def lower_bound(source: Placement, destination: Placement, *, rank: int) -> int:
    """The bytes that a rank needs and does not hold, counted as they travel; no plan can bring it less.

    A box that it needs in several places counts for each of them.
    """
    known: dict[tuple[int, int], int] = {}
    for name, demand in destination.items():
        supply = source[name]
        if (kind := (id(supply), id(demand))) not in known:
            held = [supply.places[place].box for place in _places_of(rank, supply)]
            needed = [demand.places[place].box for place in _places_of(rank, demand)]
            missing = sum(
                box.numel - union_numel([part for own in held if (part := own.intersect(box))]) for box in needed
            )
            known[kind] = missing * _wire_dtype(supply, demand).itemsize
    return sum(known[id(source[name]), id(demand)] for name, demand in destination.items())


class TransferSchedule:
    """The plan of the whole world: in which wave which parts of which parameters travel along which routes.

    The parameters travel in the order of the destination, those of different owners (pipeline stages, expert groups) in
    turn, so that all ranks send. `names` is the destination's order; item `i`, the `i`-th to travel, is part
    `part_of[i]` of parameter `param_of[i]`. `hops[0]` has the routes of each part, `hops[1]` in a plan of two levels
    those that follow `DELAY` waves later. For arguments and errors see `make_plan`.
    """

    def __init__(
        self,
        source: Placement,
        destination: Placement,
        *,
        world_size: int,
        ranks_per_node: int,
        bucket_bytes: int,
        two_level: bool = False,
    ) -> None:
        self.world_size, self._ranks_per_node = world_size, ranks_per_node
        self.names = list(destination)
        self._kinds = _Kinds(source, destination)
        self.hops: tuple[list[Routes], ...] = ([], []) if two_level else ([],)
        self._kind_of_part: list[int] = []
        first_part, busiest = [], []
        sent = np.zeros(world_size, dtype=np.int64)
        for kind, (supply, demand) in enumerate(self._kinds.holdings):
            first_part.append(len(self._kind_of_part))
            try:
                routes = find_routes(
                    supply,
                    demand,
                    itemsize=_wire_dtype(supply, demand).itemsize,
                    ranks_per_node=ranks_per_node,
                    sent_before=sent,
                )
                for part in (
                    two_hops(routes, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes)
                    if two_level
                    else ((fitting,) for fitting in routes.fit(bucket_bytes))
                ):
                    self._kind_of_part.append(kind)
                    for hop, hop_routes in zip(self.hops, part, strict=True):
                        hop.append(hop_routes)
            except ValueError as fault:
                raise ValueError(f"cannot reshard {self._kinds.example(kind)}: {fault}") from None
            sent += routes.load[0] * self._kinds.num_params[kind]
            busiest.append(int(routes.load.max()))
        kind_of = self._kinds.kind_of
        counts = np.bincount(self._kind_of_part, minlength=len(first_part))[kind_of]
        begin, duration = self._kinds.timetable(np.array(busiest, dtype=np.int64))
        turn = _count_up(counts)
        order = np.argsort(np.repeat(begin, counts) + turn * np.repeat(duration / counts, counts), kind="stable")
        self.param_of = np.repeat(np.arange(len(kind_of)), counts)[order]
        self.part_of = (np.repeat(np.array(first_part, dtype=np.int64)[kind_of], counts) + turn)[order]
        loads = [np.stack([routes.load for routes in part]).ravel() for part in zip(*self.hops, strict=True)]
        ends = cut_waves(self.part_of, np.array(loads), bucket_bytes // len(self.hops))
        self.ends = np.array(ends, dtype=np.int64)

    def traffic(self) -> Traffic:
        """What travels in all waves together."""
        total = np.zeros((3, self.world_size), dtype=np.int64)
        times = np.bincount(self.part_of, minlength=len(self._kind_of_part)).tolist()
        for routes, num in zip(chain(*self.hops), times * len(self.hops), strict=True):
            size = routes.num_bytes * routes.travels * num
            between = routes.sender // self._ranks_per_node != routes.reader // self._ranks_per_node
            total[0] += routes.per_rank(routes.sender, size)
            total[1] += routes.per_rank(routes.reader, size)
            total[2] += routes.per_rank(routes.reader, size * between)
        return Traffic(*total)

    def plan(self, rank: int, held: Layout, needed: Layout) -> RankPlan:
        """What one rank does; `make_plan` proves it as well."""
        own = [_Own(rank, layout, side, self.names, self._kinds) for side, layout in enumerate((held, needed))]
        templates: list[Template] = []
        steps, waves = [], []
        for hop, parts in enumerate(self.hops):
            first = len(templates)
            places: list[tuple[int, int]] = []  # of each template, among those that the rank has on either side
            for kind, routes in zip(self._kind_of_part, parts, strict=True):
                self._add_templates(rank, kind, routes, own, templates, places, onward=hop > 0)
            mine = [np.count_nonzero((routes.sender == rank) | (routes.reader == rank)) for routes in parts]
            counts = np.array(mine, dtype=np.int64)
            per_item = counts[self.part_of]
            place = np.repeat((np.cumsum(counts) - counts)[self.part_of], per_item) + _count_up(per_item)
            param = np.repeat(self.param_of, per_item)
            ordinals = np.array(places, dtype=np.int64).reshape(-1, 2)[place]
            pieces = [side.pieces(param, ordinals[:, number]) for number, side in enumerate(own)]
            steps.append(np.stack([*pieces, place + first], axis=1).astype(np.int32))
            item = np.repeat(np.arange(len(per_item)), per_item)
            waves.append(np.searchsorted(self.ends, item, side="right") + hop * DELAY)
        wave = np.concatenate(waves)
        order = np.argsort(wave, kind="stable")
        num_waves = len(self.ends) + (len(self.hops) - 1) * DELAY
        ends = np.searchsorted(wave[order], np.arange(num_waves), side="right")
        return RankPlan(rank, self.world_size, held, needed, templates, np.concatenate(steps)[order], ends)

    def _add_templates(
        self,
        rank: int,
        kind: int,
        routes: Routes,
        own: "Sequence[_Own]",
        templates: list[Template],
        places: list[tuple[int, int]],
        *,
        onward: bool,
    ) -> None:
        """What the rank does on its routes; in the second hop it sends from where it has received to."""
        dtype = _wire_dtype(*self._kinds.holdings[kind])
        held, needed = own
        for route in np.flatnonzero((routes.sender == rank) | (routes.reader == rank)).tolist():
            sender, reader = int(routes.sender[route]), int(routes.reader[route])
            source, destination = int(routes.source[route]), int(routes.destination[route])
            sends = sender == rank
            peer = reader if sends else sender
            templates.append(Template(routes.box_of(route), peer, dtype, onward=onward and sends))
            if onward:
                places.append((-1, needed.place(kind, source if sends else destination)))
            else:
                places.append(
                    (
                        held.place(kind, source) if sends else -1,
                        needed.place(kind, destination) if reader == rank else -1,
                    )
                )


class _Kinds:
    """The kinds of parameters: those that share the source's and the destination's holding share everything."""

    def __init__(self, source: Placement, destination: Placement) -> None:
        nobody = Holding((), torch.float64)
        self.holdings: list[tuple[Holding, Holding]] = []
        known: dict[tuple[int, int], int] = {}
        kind_of = []
        for name, demand in destination.items():
            supply = source.get(name, nobody)
            kind = known.setdefault((id(supply), id(demand)), len(known))
            if kind == len(self.holdings):
                self.holdings.append((supply, demand))
            kind_of.append(kind)
        self.kind_of = np.array(kind_of, dtype=np.int64)
        self.num_params = np.bincount(self.kind_of, minlength=len(known)).tolist()
        self._names = list(destination)

    def example(self, kind: int) -> str:
        """The first parameter of a kind."""
        return self._names[int(np.flatnonzero(self.kind_of == kind)[0])]

    def timetable(self, load: Integers) -> tuple[Times, Times]:
        """When each parameter would begin to travel, and for how long, if all ranks sent as fast as they can.

        Owners with ranks in common (the expert groups of a pipeline stage) form a stage. Each stage sends its
        parameters in their order: those of all its ranks one after the other, and in between those of its different
        owners at the same time. All stages start at 0 and end at 1.

        Args:
            load: [num_kinds], the most that a rank has to send of such a parameter, in any unit.
        """
        if not self.holdings:
            return np.zeros(0), np.zeros(0)
        owners, stages, is_shared = _owners([supply for supply, _ in self.holdings])
        stage, shared, amount = (np.array(column)[self.kind_of] for column in (stages, is_shared, load))
        owner = np.where(shared, -1, np.array(owners)[self.kind_of])
        by_stage = np.argsort(stage, kind="stable")
        begin, duration = np.empty(len(stage)), np.empty(len(stage))
        for members in np.split(by_stage, np.cumsum(np.bincount(stage))[:-1]):
            runs = np.flatnonzero(np.diff(shared[members], prepend=~shared[members[:1]]))
            now = 0.0
            for run in np.split(members, runs[1:]):
                order = run[np.argsort(owner[run], kind="stable")]
                before = np.cumsum(amount[order]) - amount[order]
                first = np.flatnonzero(np.diff(owner[order], prepend=-2))
                before -= np.repeat(before[first], np.diff(first, append=len(order)))
                begin[order] = now + before
                now += (before + amount[order]).max()
            begin[members] /= now
            duration[members] = amount[members] / now
        return begin, duration


def _owners(sources: Sequence[Holding]) -> tuple[list[int], list[int], list[bool]]:
    """For each source the number of its set of ranks, that of the sets it overlaps, and whether it spans all these."""
    known: dict[int, frozenset[int]] = {}
    for source in sources:
        if id(source) not in known:
            known[id(source)] = frozenset(rank for place in source.places for rank in place.ranks)
    groups = list(dict.fromkeys(known.values()))
    number = {group: index for index, group in enumerate(groups)}
    spans: list[set[int]] = []  # disjoint
    for group in groups:
        touched = [span for span in spans if not span.isdisjoint(group)]
        spans = [span for span in spans if span.isdisjoint(group)] + [set(group).union(*touched)]
    stage_of = {rank: stage for stage, span in enumerate(spans) for rank in span}
    of_source = [known[id(source)] for source in sources]
    stages = [stage_of[min(group)] for group in of_source]
    is_shared = [len(group) == len(spans[stage]) for group, stage in zip(of_source, stages, strict=True)]
    return [number[group] for group in of_source], stages, is_shared


class _Own:
    """Which piece of a rank's layout is which of its places, for every parameter."""

    def __init__(self, rank: int, layout: Layout, side: int, names: Sequence[str], kinds: _Kinds) -> None:
        self._ordinals = [_places_of(rank, pair[side]) for pair in kinds.holdings]
        by_name: dict[str, list[int]] = defaultdict(list)
        for number, piece in enumerate(layout):
            by_name[piece.name].append(number)
        boxes = [
            [pair[side].places[place].box for place in ordinals]
            for pair, ordinals in zip(kinds.holdings, self._ordinals, strict=True)
        ]
        first: list[int] = []
        numbers: list[int] = []
        for name, kind in zip(names, kinds.kind_of.tolist(), strict=True):
            first.append(len(numbers))
            found = by_name.pop(name, [])
            if [layout[number].box for number in found] != boxes[kind]:
                found = _in_order(found, layout, boxes[kind], name, rank)
            numbers += found
        if side and by_name:
            raise ValueError(f"rank {rank} needs {min(by_name)}, which the placement does not list")
        self._first, self._numbers = np.array(first, dtype=np.int64), np.array([*numbers, -1], dtype=np.int64)

    def place(self, kind: int, place: int) -> int:
        """Which of the rank's own places of this kind that place is."""
        return self._ordinals[kind].index(place)

    def pieces(self, params: Integers, ordinals: Integers) -> Integers:
        """The numbers of the pieces, -1 where the ordinal is -1."""
        return self._numbers[np.where(ordinals < 0, -1, self._first[params] + ordinals)]


def _in_order(numbers: Sequence[int], layout: Layout, expected: Sequence[Box], name: str, rank: int) -> list[int]:
    """The pieces of a parameter in the order of the rank's places of it."""
    by_box: dict[Box, list[int]] = defaultdict(list)
    for number in numbers:
        by_box[layout[number].box].append(number)
    if Counter(layout[number].box for number in numbers) != Counter(expected):
        has, says = (", ".join(map(str, boxes)) or "nothing" for boxes in (by_box, expected))
        raise ValueError(f"rank {rank}: its layout has {has} of {name}, the placement {says}")
    return [by_box[box].pop(0) for box in expected]


def _places_of(rank: int, holding: Holding) -> list[int]:
    """The places that a rank has, in order."""
    places = []
    for number, place in enumerate(holding.places):
        position = bisect_left(place.ranks, rank)
        if position < len(place.ranks) and place.ranks[position] == rank:
            places.append(number)
    return places


def _wire_dtype(source: Holding, destination: Holding) -> torch.dtype:
    """The smaller type of both ends, so that a cast happens where it saves bytes."""
    return min(destination.dtype, source.dtype, key=lambda dtype: dtype.itemsize)


def _count_up(sizes: Integers) -> Integers:
    """`[0 .. sizes[0]) [0 .. sizes[1]) ...`, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
