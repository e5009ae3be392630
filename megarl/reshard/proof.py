"""The proof that a plan is correct, based on the local tensors and independent of the planner."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megarl.columns import Integers
from megarl.platform.hashing import INCREMENT, hashed
from megarl.reshard.layout import Box, Layout, Piece
from megarl.reshard.plan import DELAY, Choice, RankPlan

Hashes = npt.NDArray[np.uint64]


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
    by_param: dict[str, list[Piece]] = defaultdict(list)
    for piece in layout:
        by_param[piece.param].append(piece)
    runs = {(piece.box.shape, piece.stride): _runs(piece.box.shape, piece.stride) for piece in layout}
    for param, pieces in by_param.items():
        starts = []
        ends = []
        for piece in pieces:
            first, length = runs[piece.box.shape, piece.stride]
            starts.append(piece.offset + first)
            ends.append(piece.offset + first + length)
        start = np.concatenate(starts)
        order = np.argsort(start, kind="stable")
        clashes = np.flatnonzero(start[order][1:] < np.concatenate(ends)[order][:-1])
        if clashes.size:
            piece_of_run = np.repeat(np.arange(len(pieces)), list(map(len, starts)))
            clash = order[clashes[0] : clashes[0] + 2]
            one, other = (pieces[number] for number in piece_of_run[clash].tolist())
            raise ValueError(
                f"rank {rank}: {one.name} {one.box} and {other.name} {other.box} share an element of {param}"
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
    readers, sent = _transfers(plan, plan.sent(), is_sender=True)
    np.add.at(total, readers, sent)
    _, received = _transfers(plan, plan.received(), is_sender=False)
    np.subtract.at(total, np.full(len(received), plan.rank), received)
    return total.view(np.int64)


def _transfers(plan: RankPlan, chosen: Choice, *, is_sender: bool) -> tuple[Integers, Hashes]:
    """Return the peers of the chosen steps, and the hash of the transfer of each."""
    steps = np.flatnonzero(chosen)
    source, destination, template = plan.steps[steps].T
    peer = np.array([each.peer for each in plan.templates], dtype=np.int64)[template]
    box = _hashes([f"{each.box} {each.dtype}" for each in plan.templates])[template]
    wave = np.searchsorted(plan.ends, steps, side="right")
    sender = np.full(len(steps), plan.rank) if is_sender else peer

    messages = wave * plan.world_size + peer
    order = np.argsort(messages, kind="stable")
    position = np.empty(len(steps), dtype=np.int64)
    position[order] = np.arange(len(steps)) - np.searchsorted(messages[order], messages[order])

    is_held = source >= 0  # a step that receives or forwards has no piece of the source
    transfers = np.empty(len(steps), dtype=np.uint64)
    transfers[is_held] = _hashes([piece.name for piece in plan.held])[source[is_held]]
    transfers[~is_held] = _hashes([piece.name for piece in plan.needed])[destination[~is_held]]
    for value in (box, wave, sender, position):
        transfers = hashed(transfers + value.astype(np.uint64) + INCREMENT)
    return peer, transfers


def _hashes(texts: Sequence[str]) -> Hashes:
    return np.array([zlib.crc32(text.encode()) for text in texts], dtype=np.uint64)
