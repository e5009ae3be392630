"""Routes in two hops: what several ranks of a node need from outside crosses the network once.

Each of these ranks imports a share of the box, and two waves later it passes its share on to the others, out of its own
local tensor. So nothing is staged anywhere, and every rank still receives exactly what it needs and does not hold.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megarl.reshard.layout import Integers
from megarl.reshard.routes import Routes


def two_hops(routes: Routes, *, ranks_per_node: int, bucket_bytes: int) -> Iterator[tuple[Routes, Routes]]:
    """The routes in parts that fit half a bucket per hop: from outside or directly, and onwards inside the nodes.

    In the second hop `source` counts the destination's places, because the sender has written there before.
    """
    nothing = np.zeros(0, dtype=np.int64)
    for part in routes.fit(bucket_bytes // 2):
        hops = _share(part, ranks_per_node=ranks_per_node) if part.lo.shape[1] else (part, _only(part, nothing))
        if max(int(hop.load.max()) for hop in hops) <= bucket_bytes // 2:
            yield hops
        else:  # the shares of small boxes take more room than the boxes, because each begins aligned
            yield part, _only(part, nothing)


def _share(routes: Routes, *, ranks_per_node: int) -> tuple[Routes, Routes]:
    node = routes.reader // ranks_per_node
    outside = routes.sender // ranks_per_node != node
    order = np.lexsort((routes.reader, node, routes.box, ~outside))[: outside.sum()]
    fresh = np.diff(routes.box[order], prepend=-1).astype(bool) | np.diff(node[order], prepend=-1).astype(bool)
    group = np.cumsum(fresh) - 1
    first, sizes = np.flatnonzero(fresh), np.bincount(group)
    turn = np.arange(len(order)) - first[group]
    # Each importer's share is a box of its own, behind those of the routes that stay as they are.
    direct = np.setdiff1d(np.arange(len(routes.box)), order)
    lo, hi = _shares(routes, routes.box[order], turn, sizes[group])
    kept = np.flatnonzero((lo < hi).all(axis=1))
    imports = _only(routes, np.concatenate([direct, order[kept]]))
    boxes = np.concatenate([routes.box[direct], len(routes.lo) + np.arange(len(kept))])
    first_hop = replace(
        imports, lo=np.concatenate([routes.lo, lo[kept]]), hi=np.concatenate([routes.hi, hi[kept]]), box=boxes
    )
    # To every other member of the group: `others` counts the members after the importer, round and round.
    times = (sizes[group] - 1)[kept]
    importer = np.repeat(kept, times)
    others = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times) + 1
    member = first[group[importer]] + (turn[importer] + others) % sizes[group[importer]]
    onward = _only(routes, order[member])
    passed = replace(
        onward,
        lo=lo[kept],
        hi=hi[kept],
        box=np.repeat(np.arange(len(kept)), times),
        sender=routes.reader[order[importer]],
        source=routes.destination[order[importer]],
    )
    return first_hop, passed


def _shares(routes: Routes, box: Integers, turn: Integers, num: Integers) -> tuple[Integers, Integers]:
    """The ends of the `turn`-th of `num` equal parts of each box, along its first dimension that can be cut."""
    lo, hi = routes.lo[box].copy(), routes.hi[box].copy()
    extents = hi - lo
    row, dim = np.arange(len(lo)), np.argmax(extents > 1, axis=1)
    extent, low = extents[row, dim], lo[row, dim].copy()
    lo[row, dim] = low + extent * turn // num
    hi[row, dim] = low + extent * (turn + 1) // num
    return lo, hi


def _only(routes: Routes, chosen: Integers) -> Routes:
    columns = {name: getattr(routes, name)[chosen] for name in ("box", "sender", "source", "reader", "destination")}
    return replace(routes, **columns)
