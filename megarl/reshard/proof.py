"""The proof that a plan is correct, based on the local tensors and independent of the planner."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megarl.platform.hashing import INCREMENT, hashed
from megarl.reshard.layout import Box, Integers, Layout
from megarl.reshard.plan import DELAY, RankPlan


def check_plan(plan: RankPlan) -> None:
    """Prove that the plan writes every element that the rank's destination lists exactly once.

    Raises:
        ValueError: two pieces share an element of a local tensor, the boxes written to a piece do not tile it exactly,
            or a box is forwarded before it has arrived.
    """
    _check_tiled(plan)
    _check_forwarded(plan)
    _check_disjoint(plan.needed, plan.rank)


def _check_tiled(plan: RankPlan) -> None:
    """Raise ValueError unless disjoint boxes are written to each piece and add up to it."""
    writes = plan.steps[(plan.steps[:, 1] >= 0) & ~plan.forwarded()]
    writes = writes[np.argsort(writes[:, 1], kind="stable")]
    bounds = np.searchsorted(writes[:, 1], np.arange(len(plan.needed) + 1)).tolist()
    templates = writes[:, 2].tolist()
    proven: set[tuple[Box, tuple[int, ...]]] = set()
    for number, piece in enumerate(plan.needed):
        tiles = tuple(templates[bounds[number] : bounds[number + 1]])
        if (piece.box, tiles) in proven:
            continue
        boxes = [plan.templates[tile].box for tile in tiles]
        written = sum(box.numel for box in boxes)
        if written != piece.box.numel or not all(map(piece.box.contains, boxes)):
            raise ValueError(
                f"rank {plan.rank}: the plan writes {written} of the {piece.box.numel} elements of {piece.name} "
                f"{piece.box} in {piece.param}"
            )
        for one, other in combinations(boxes, 2):
            if one.intersect(other):
                raise ValueError(f"rank {plan.rank}: {piece.name} {one} and {other} are both written to {piece.param}")
        proven.add((piece.box, tiles))


def _check_forwarded(plan: RankPlan) -> None:
    """Raise ValueError unless every forwarded box has arrived in time, in a box that contains it."""
    if not plan.forwarded().any():
        return
    wave = np.searchsorted(plan.ends, np.arange(len(plan.steps)), side="right").tolist()
    arrived: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    for row in np.flatnonzero(plan.received()).tolist():
        _, piece, template = plan.steps[row].tolist()
        arrived[piece].append((wave[row], plan.templates[template].box))
    for row in np.flatnonzero(plan.forwarded()).tolist():
        _, piece, template = plan.steps[row].tolist()
        box = plan.templates[template].box
        if not any(other.contains(box) for before, other in arrived[piece] if before + DELAY <= wave[row]):
            raise ValueError(f"rank {plan.rank}: {plan.needed[piece].name} {box} is forwarded before it has arrived")


def _check_disjoint(layout: Layout, rank: int) -> None:
    """Raise ValueError if two pieces have an element of a local tensor in common."""
    if not layout:
        return
    params = {param: number for number, param in enumerate(dict.fromkeys(piece.param for piece in layout))}
    kinds = [(piece.box.shape, piece.stride) for piece in layout]
    runs = {kind: _runs(*kind) for kind in set(kinds)}
    starts_of_piece = [piece.offset + runs[kind][0] for piece, kind in zip(layout, kinds, strict=True)]
    counts = [len(starts) for starts in starts_of_piece]
    starts = np.concatenate(starts_of_piece)
    ends = starts + np.repeat([runs[kind][1] for kind in kinds], counts)
    tensors = np.repeat([params[piece.param] for piece in layout], counts)
    pieces = np.repeat(np.arange(len(layout)), counts)
    order = np.lexsort((starts, tensors))
    same = tensors[order][1:] == tensors[order][:-1]
    clashes = np.flatnonzero(same & (starts[order][1:] < ends[order][:-1]))
    if clashes.size:
        one, other = (layout[piece] for piece in pieces[order[clashes[0] : clashes[0] + 2]])
        raise ValueError(
            f"rank {rank}: {one.name} {one.box} and {other.name} {other.box} share an element of {one.param}"
        )


def _runs(shape: Sequence[int], stride: Sequence[int]) -> tuple[Integers, int]:
    """Return the starts of a view's runs of adjacent elements, relative to its first element, and the runs' length."""
    starts = np.zeros(1, dtype=np.int64)
    length = 1
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if step == length and len(starts) == 1:
            length *= extent
        elif extent > 1:
            starts = (starts[:, None] + np.arange(extent) * step).ravel()
    return starts, length


def disagreement(plan: RankPlan) -> Integers:
    """Return [world_size] numbers that add up to zero over all ranks if every rank is sent what it expects.

    They add hashes of the transfers that this rank sends to each rank, and subtract hashes of the transfers that it
    expects. A hash covers wave, sender, position among the transfers of the two ranks in the wave, parameter, box and
    dtype.
    """
    total = np.zeros(plan.world_size, dtype=np.uint64)
    peers = np.array([template.peer for template in plan.templates], dtype=np.int64)
    boxes = _hashes([f"{template.box} {template.dtype}" for template in plan.templates])
    wave = np.searchsorted(plan.ends, np.arange(len(plan.steps)), side="right")
    sources = _hashes([piece.name for piece in plan.held])
    destinations = _hashes([piece.name for piece in plan.needed])
    for side, chosen in enumerate((plan.sent(), plan.received())):
        rows = np.flatnonzero(chosen)
        template = plan.steps[rows, 2]
        group = wave[rows] * plan.world_size + peers[template]
        order = np.argsort(group, kind="stable")
        rows = rows[order]
        template = template[order]
        group = group[order]
        position = np.arange(len(rows)) - np.searchsorted(group, group)
        first_hop = plan.steps[rows, 0] >= 0
        names = np.empty(len(rows), dtype=np.uint64)
        names[first_hop] = sources[plan.steps[rows[first_hop], 0]]
        names[~first_hop] = destinations[plan.steps[rows[~first_hop], 1]]
        sender = np.full(len(rows), plan.rank) if side == 0 else peers[template]
        parcel = names
        for value in (boxes[template], wave[rows], sender, position):
            parcel = hashed(parcel + value.astype(np.uint64) + INCREMENT)
        if side == 0:
            np.add.at(total, peers[template], parcel)
        else:
            np.subtract.at(total, np.full(len(rows), plan.rank), parcel)
    return total.view(np.int64)


def _hashes(texts: Sequence[str]) -> npt.NDArray[np.uint64]:
    return np.array([zlib.crc32(text.encode()) for text in texts], dtype=np.uint64)
