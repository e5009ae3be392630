"""Routes in two hops: data that several ranks of a node need from outside crosses the network once.

Each of these ranks imports a share of the box. Two waves later it forwards its share to the other ranks from its own
local tensor. So no staging is needed, and every rank still receives exactly the data that it needs and does not hold.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megarl.reshard.columns import count_up
from megarl.reshard.layout import Integers
from megarl.reshard.routes import Routes, equal_parts


def two_hops(routes: Routes, *, ranks_per_node: int, bucket_bytes: int) -> Iterator[tuple[Routes, Routes]]:
    """Yield the routes in parts that fit half a bucket per hop: into the nodes or direct, then inside the nodes.

    In the second hop `source` counts places of the destination, because the sender has written there before.
    """
    nothing = np.zeros(0, dtype=np.int64)
    for part in routes.fit(bucket_bytes // 2):
        hops = _share(part, ranks_per_node=ranks_per_node) if part.lo.shape[1] else (part, _only(part, nothing))
        if max(int(hop.load.max()) for hop in hops) <= bucket_bytes // 2:
            yield hops
        else:  # shares of small boxes take more space than the boxes, because each share is aligned
            yield part, _only(part, nothing)


def _share(routes: Routes, *, ranks_per_node: int) -> tuple[Routes, Routes]:
    """Replace the routes into a node that carry the same box by shares; return the routes of both hops.

    The readers of one box on one node, outside of the node of the sender, are a group; `order` has the routes of all
    groups, group after group, and all other columns up to `sizes` follow that order:

        box    reader  node      group  turn     first  sizes
        0      8       1         0      0        0      2
        0      9       1         0      1
        0      16      2         1      0        2      1
    """
    node = routes.reader // ranks_per_node
    outside = routes.sender // ranks_per_node != node
    order = np.lexsort((routes.reader, node, routes.box, ~outside))[: outside.sum()]
    fresh = np.diff(routes.box[order], prepend=-1).astype(bool) | np.diff(node[order], prepend=-1).astype(bool)
    group = np.cumsum(fresh) - 1
    first = np.flatnonzero(fresh)
    sizes = np.bincount(group)
    turn = np.arange(len(order)) - first[group]
    # The share of each importer is a new box, numbered after the boxes of the unchanged (direct) routes.
    direct = np.setdiff1d(np.arange(len(routes.box)), order)
    boxes_of_order = routes.box[order]
    lo, hi = equal_parts(routes.lo[boxes_of_order], routes.hi[boxes_of_order], turn, sizes[group])
    kept = np.flatnonzero((lo < hi).all(axis=1))
    imports = _only(routes, np.concatenate([direct, order[kept]]))
    boxes = np.concatenate([routes.box[direct], len(routes.lo) + np.arange(len(kept))])
    first_hop = replace(
        imports, lo=np.concatenate([routes.lo, lo[kept]]), hi=np.concatenate([routes.hi, hi[kept]]), box=boxes
    )
    # Each importer sends to every other member of its group: `others` counts the members after it, cyclically.
    times = (sizes[group] - 1)[kept]
    importer = np.repeat(kept, times)
    others = count_up(times) + 1
    member = first[group[importer]] + (turn[importer] + others) % sizes[group[importer]]
    forwarded = _only(routes, order[member])
    passed = replace(
        forwarded,
        lo=lo[kept],
        hi=hi[kept],
        box=np.repeat(np.arange(len(kept)), times),
        sender=routes.reader[order[importer]],
        source=routes.destination[order[importer]],
    )
    return first_hop, passed


def _only(routes: Routes, chosen: Integers) -> Routes:
    columns = {name: getattr(routes, name)[chosen] for name in ("box", "sender", "source", "reader", "destination")}
    return replace(routes, **columns)
