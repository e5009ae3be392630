"""The plan of what each rank copies, sends and receives, wave by wave, made from two placements.

The plan is a pure function of the placements, so every rank computes its own plan without a message. `make_plan` proves
a plan before it returns it: every destination element is written exactly once. A rank receives exactly the elements
that it needs and does not hold, and in no wave does a rank send or write more than a bucket.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from megarl.columns import Integers
from megarl.platform.errors import UserError
from megarl.reshard.columns import count_up, starts
from megarl.reshard.kinds import ShardingPattern, ShardingPatterns
from megarl.reshard.layout import Box, Layout, Placement, ShardedBoxes, placement_of
from megarl.reshard.moves import Moves, find_moves, union_numel
from megarl.reshard.plan import DELAY, RankPlan, Template
from megarl.reshard.proof import check_plan
from megarl.reshard.two_level import two_hops
from megarl.reshard.waves import cut_waves


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
    """Return the proven plan of one rank.

    Args:
        source: the boxes that each rank holds.
        destination: the boxes that each rank must hold afterwards.
        held: the rank's own local tensors on the source's side.
        needed: the rank's own local tensors on the destination's side.
        rank: the rank to plan for.
        world_size: number of ranks.
        ranks_per_node: ranks `k * ranks_per_node ..` are on node `k`.
        bucket_bytes: the most bytes that a rank sends, and the most that it writes, in one wave.
        two_level: whether data that several ranks of a node need crosses the network once and is forwarded in the node.

    Raises:
        ValueError: nobody holds an element that a destination needs, the bucket is too small, or the rank's own
            layouts differ from the placements.
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
    """Return the proven plan of one rank from the layouts of all ranks; as `make_plan`."""
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
    """Return the bytes on the wire that a rank needs and does not hold; no plan can send it fewer.

    A box that the rank needs in several places counts for each of them.
    """
    known: dict[ShardingPattern, int] = {}
    for name, demand in destination.items():
        supply = source[name]
        kind = (supply, demand)
        if kind not in known:
            held = [supply.places[place].box for place in _places_of(rank, supply)]
            needed = [demand.places[place].box for place in _places_of(rank, demand)]
            missing = 0
            for box in needed:
                parts = [own.intersect(box) for own in held]
                missing += box.numel - union_numel([part for part in parts if part])
            known[kind] = missing * _wire_dtype(supply, demand).itemsize
    return sum(known[source[name], demand] for name, demand in destination.items())


class TransferSchedule:
    """The plan of all ranks: the waves in which the parts of parameters travel, and their moves.

    Parameters travel in the order of the destination, but those of different owners (pipeline stages, expert groups)
    take turns, so that all ranks send. All columns of integers index one of four spaces:

        param   a parameter; `names` is the destination's order
        kind    all parameters with equal holdings on both sides, which share their moves
        part    a share of every parameter of a kind that fits a bucket; numbered over all kinds
        item    one part of one parameter, which travels in one wave; numbered in the order of travel

    Example: `a` and `b` are alike and fit a bucket; `c` is so large that it travels in two parts.

        param               a  b  c
        kind of the param   0  0  1
        part                0  1  2
        kind of the part    0  1  1        the first parts of the kinds are 0 and 1
        item                0  1  2  3     that is a, b, the first half of c, the second half of c
        param_of            0  1  2  2
        part_of             0  0  1  2

    `hops[0][part]` are the moves of a part. In a plan of two levels `hops[1][part]` are the moves inside the nodes,
    `DELAY` waves later. Wave `w` has the items from `ends[w - 1]` up to `ends[w]`. For arguments and errors see
    `make_plan`.
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
        self.world_size = world_size
        self._ranks_per_node = ranks_per_node
        self.names = list(destination)
        self._kinds = ShardingPatterns(source, destination)
        self.hops: tuple[list[Moves], ...] = ([], []) if two_level else ([],)
        self._kind_of_part: list[int] = []
        load_of_kind = self._add_moves(bucket_bytes=bucket_bytes, two_level=two_level)
        self.param_of, self.part_of = self._items(load_of_kind)
        load_of_part = [np.stack([moves.load for moves in part]).ravel() for part in zip(*self.hops, strict=True)]
        ends = cut_waves(self.part_of, np.array(load_of_part), bucket_bytes // len(self.hops))
        self.ends = np.array(ends, dtype=np.int64)

    def _add_moves(self, *, bucket_bytes: int, two_level: bool) -> Integers:
        """Find the moves of every kind and cut them into parts; return [num_kinds], the load of the busiest rank."""
        busiest = []
        sent = np.zeros(self.world_size, dtype=np.int64)
        for kind, (supply, demand) in enumerate(self._kinds.boxes):
            try:
                moves = find_moves(
                    supply,
                    demand,
                    itemsize=_wire_dtype(supply, demand).itemsize,
                    ranks_per_node=self._ranks_per_node,
                    sent_before=sent,
                )
                parts: Iterable[tuple[Moves, ...]] = ((fitting,) for fitting in moves.fit(bucket_bytes))
                if two_level:
                    parts = two_hops(moves, ranks_per_node=self._ranks_per_node, bucket_bytes=bucket_bytes)
                for part in parts:
                    self._kind_of_part.append(kind)
                    for hop, hop_moves in zip(self.hops, part, strict=True):
                        hop.append(hop_moves)
            except UserError as fault:
                raise UserError(f"cannot reshard {self._kinds.example(kind)}: {fault}") from None
            sent += moves.load[0] * self._kinds.num_params[kind]
            busiest.append(int(moves.load.max()))
        return np.array(busiest, dtype=np.int64)

    def _items(self, load_of_kind: Integers) -> tuple[Integers, Integers]:
        """Put all parts of all parameters in the order of travel; return the param and the part of each item."""
        kind_of = self._kinds.kind_of
        parts_of_kind = np.bincount(self._kind_of_part, minlength=len(load_of_kind))
        num_parts = parts_of_kind[kind_of]  # of each param
        param = np.repeat(np.arange(len(kind_of)), num_parts)
        number = count_up(num_parts)  # of a part among those of its param
        part = starts(parts_of_kind)[kind_of[param]] + number
        begin, duration = self._kinds.timetable(load_of_kind)
        time = begin[param] + number * (duration / num_parts)[param]
        order = np.argsort(time, kind="stable")
        return param[order], part[order]

    def traffic(self, *, domain: int | None = None) -> Traffic:
        """Return the traffic of all waves together, and the part of it that crosses from one domain to another.

        `domain`: the ranks of a domain; None: those of a node.
        """
        domain = domain or self._ranks_per_node
        total = np.zeros((3, self.world_size), dtype=np.int64)
        params_of_part = np.bincount(self.part_of, minlength=len(self._kind_of_part)).tolist()
        for moves, num_params in zip(chain(*self.hops), params_of_part * len(self.hops), strict=True):
            size = moves.num_bytes * moves.travels * num_params
            between = moves.sender // domain != moves.reader // domain
            total[0] += moves.per_rank(moves.sender, size)
            total[1] += moves.per_rank(moves.reader, size)
            total[2] += moves.per_rank(moves.reader, size * between)
        return Traffic(*total)

    def plan(self, rank: int, held: Layout, needed: Layout) -> RankPlan:
        """Return what one rank does, unproven; `make_plan` proves it.

        A step is what the rank does with one move of one item. The templates of a part, one for each of its moves
        that concern the rank, are listed one after the other. In the example above, if the rank has two moves of part
        0 and one move of parts 1 and 2:

            part                          0        1  2
            steps of the part             2        1  1
            template                      0  1     2  3
            item                          0  0  1  1  2  3
            template of the step          0  1  0  1  2  3
        """
        own_held = _OwnPieces(rank, held, 0, self.names, self._kinds)
        own_needed = _OwnPieces(rank, needed, 1, self.names, self._kinds)
        templates: list[Template] = []
        steps = []
        waves = []
        for hop, parts in enumerate(self.hops):
            templates_before = len(templates)
            ordinals: list[tuple[int, int]] = []  # of each template: the rank's own place that it reads, and writes
            counts = []
            for kind, moves in zip(self._kind_of_part, parts, strict=True):
                found = [*self._templates(rank, kind, moves, own_held, own_needed, forwarded=hop > 0)]
                templates += [template for template, _ in found]
                ordinals += [ordinal for _, ordinal in found]
                counts.append(len(found))
            steps_of_part = np.array(counts, dtype=np.int64)
            steps_of_item = steps_of_part[self.part_of]
            item = np.repeat(np.arange(len(steps_of_item)), steps_of_item)
            template = starts(steps_of_part)[self.part_of[item]] + count_up(steps_of_item)
            source, destination = np.array(ordinals, dtype=np.int64).reshape(-1, 2)[template].T
            read = own_held.pieces(self.param_of[item], source)
            written = own_needed.pieces(self.param_of[item], destination)
            steps.append(np.stack([read, written, templates_before + template], axis=1).astype(np.int32))
            waves.append(np.searchsorted(self.ends, item, side="right") + hop * DELAY)
        wave = np.concatenate(waves)
        order = np.argsort(wave, kind="stable")
        num_waves = len(self.ends) + (len(self.hops) - 1) * DELAY
        ends = np.searchsorted(wave[order], np.arange(num_waves), side="right")
        return RankPlan(rank, self.world_size, held, needed, templates, np.concatenate(steps)[order], ends)

    def _templates(
        self,
        rank: int,
        kind: int,
        moves: Moves,
        held: "_OwnPieces",
        needed: "_OwnPieces",
        *,
        forwarded: bool,
    ) -> Iterator[tuple[Template, tuple[int, int]]]:
        """Yield a template for every move of the rank, and its places that the move reads and writes; -1: none.

        In the second hop the rank sends from its destination.
        """
        dtype = _wire_dtype(*self._kinds.boxes[kind])
        for move in np.flatnonzero((moves.sender == rank) | (moves.reader == rank)).tolist():
            sender = int(moves.sender[move])
            reader = int(moves.reader[move])
            source = int(moves.source[move])
            destination = int(moves.destination[move])
            sends = sender == rank
            peer = reader if sends else sender
            template = Template(moves.box_of(move), peer, dtype, forwarded=forwarded and sends)
            if forwarded:
                yield template, (-1, needed.ordinal(kind, source if sends else destination))
            else:
                held_piece = held.ordinal(kind, source) if sends else -1
                needed_piece = needed.ordinal(kind, destination) if reader == rank else -1
                yield template, (held_piece, needed_piece)


class _OwnPieces:
    """The pieces of a rank's layout by its places, for every parameter.

    A rank has some of the places of a kind; its `ordinal`-th place of a parameter is the piece `first + ordinal`.
    """

    def __init__(self, rank: int, layout: Layout, side: int, names: Sequence[str], kinds: ShardingPatterns) -> None:
        self._places = [_places_of(rank, pair[side]) for pair in kinds.boxes]
        by_name: dict[str, list[int]] = defaultdict(list)
        for number, piece in enumerate(layout):
            by_name[piece.name].append(number)
        boxes = []
        for pair, places in zip(kinds.boxes, self._places, strict=True):
            boxes.append([pair[side].places[place].box for place in places])
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
        self._first = np.array(first, dtype=np.int64)
        self._numbers = np.array([*numbers, -1], dtype=np.int64)

    def ordinal(self, kind: int, place: int) -> int:
        """Return the position of a place among the rank's own places of a kind."""
        return self._places[kind].index(place)

    def pieces(self, params: Integers, ordinals: Integers) -> Integers:
        """Return the numbers of the pieces; -1 if the ordinal is -1."""
        return self._numbers[np.where(ordinals < 0, -1, self._first[params] + ordinals)]


def _in_order(numbers: Sequence[int], layout: Layout, expected: Sequence[Box], name: str, rank: int) -> list[int]:
    """Return the pieces of a parameter in the order of the rank's places."""
    by_box: dict[Box, list[int]] = defaultdict(list)
    for number in numbers:
        by_box[layout[number].box].append(number)
    if Counter(layout[number].box for number in numbers) != Counter(expected):
        has, listed = (", ".join(map(str, boxes)) or "nothing" for boxes in (by_box, expected))
        raise ValueError(f"rank {rank}: its layout has {has} of {name}, the placement {listed}")
    return [by_box[box].pop(0) for box in expected]


def _places_of(rank: int, boxes: ShardedBoxes) -> list[int]:
    """Return the numbers of the places that a rank has, ascending."""
    places = []
    for number, place in enumerate(boxes.places):
        position = bisect_left(place.ranks, rank)
        if position < len(place.ranks) and place.ranks[position] == rank:
            places.append(number)
    return places


def _wire_dtype(source: ShardedBoxes, destination: ShardedBoxes) -> torch.dtype:
    """Return the smaller dtype of both ends, so that a cast happens on the end that saves bytes."""
    return min(destination.dtype, source.dtype, key=lambda dtype: dtype.itemsize)
