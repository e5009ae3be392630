"""Moves in two hops: data that several ranks of a node need from outside crosses the network once.

Each of these ranks imports a share of the box. Two waves later it forwards its share to the other ranks from its own
local tensor. So no staging is needed, and every rank still receives exactly the data that it needs and does not hold.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megarl.columns import Integers
from megarl.reshard.columns import count_up
from megarl.reshard.moves import Moves, equal_parts


def two_hops(moves: Moves, *, ranks_per_node: int, bucket_bytes: int) -> Iterator[tuple[Moves, Moves]]:
    """Yield the moves in parts that fit half a bucket per hop: into the nodes or direct, then inside the nodes.

    In the second hop `source` counts places of the destination, because the sender has written there before.
    """
    nothing = np.zeros(0, dtype=np.int64)
    for part in moves.fit(bucket_bytes // 2):
        hops = _share(part, ranks_per_node=ranks_per_node) if part.lo.shape[1] else (part, _only(part, nothing))
        if max(int(hop.load.max()) for hop in hops) <= bucket_bytes // 2:
            yield hops
        else:  # shares of small boxes take more space than the boxes, because each share is aligned
            yield part, _only(part, nothing)


def _share(moves: Moves, *, ranks_per_node: int) -> tuple[Moves, Moves]:
    """Replace the moves into a node that carry the same box by shares; return the moves of both hops.

    The readers of one box on one node, outside of the node of the sender, are a group. Each of them, a member, imports
    its share of the box, and forwards it to the others.
    """
    move, first, size = _groups(moves, ranks_per_node)
    turn = np.arange(len(move)) - first  # of a member in its group
    box = moves.box[move]
    lo, hi = equal_parts(moves.lo[box], moves.hi[box], turn, size)
    importers = np.flatnonzero((lo < hi).all(axis=1))  # a box of few elements has no share for some members
    lo = lo[importers]
    hi = hi[importers]
    # The share of each importer is a new box, numbered after the boxes of the unchanged (direct) moves.
    direct = np.setdiff1d(np.arange(len(moves.box)), move)
    new_boxes = len(moves.lo) + np.arange(len(importers))
    first_hop = replace(
        _only(moves, np.concatenate([direct, move[importers]])),
        lo=np.concatenate([moves.lo, lo]),
        hi=np.concatenate([moves.hi, hi]),
        box=np.concatenate([moves.box[direct], new_boxes]),
    )
    # Each importer sends to every other member of its group: `later` counts the members after it, cyclically.
    times = size[importers] - 1
    importer = np.repeat(importers, times)
    later = count_up(times) + 1
    member = first[importer] + (turn[importer] + later) % size[importer]
    second_hop = replace(
        _only(moves, move[member]),
        lo=lo,
        hi=hi,
        box=np.repeat(np.arange(len(importers)), times),
        sender=moves.reader[move[importer]],
        source=moves.destination[move[importer]],
    )
    return first_hop, second_hop


def _groups(moves: Moves, ranks_per_node: int) -> tuple[Integers, Integers, Integers]:
    """Return the members of all groups, group after group: the move, the group's first member, and the group's size.

    box    reader  node    move  first  size
    0      8       1       0     0      2
    0      9       1       1     0      2
    0      16      2       2     2      1
    """
    node = moves.reader // ranks_per_node
    outside = np.flatnonzero(moves.sender // ranks_per_node != node)
    group = moves.box * (moves.world_size + 1) + node
    move = outside[np.lexsort((moves.reader[outside], group[outside]))]
    _, first, sizes = np.unique(group[move], return_index=True, return_counts=True)
    return move, np.repeat(first, sizes), np.repeat(sizes, sizes)


def _only(moves: Moves, chosen: Integers) -> Moves:
    columns = {name: getattr(moves, name)[chosen] for name in ("box", "sender", "source", "reader", "destination")}
    return replace(moves, **columns)
