"""The division of the sequence of all parameters into waves that fit a bucket on every rank."""

from itertools import pairwise

import numpy as np

from megarl.columns import Integers

BLOCKS_PER_WAVE = 8  # fewest additions per wave; more additions only cost time


def cut_waves(parts: Integers, loads: Integers, bucket_bytes: int) -> list[int]:
    """Return the ends of the waves. Each wave has as many items as fit on the busiest rank.

    Args:
        parts: [num_items], the row of `loads` of each item, in the order of travel.
        loads: [num_parts, num_columns], the bytes that an item adds to each bucket, at most a full bucket.
        bucket_bytes: the size of every bucket.

    Returns:
        the position after the last item of each wave.
    """
    if not len(parts):
        return []
    # Ranks with equal loads, such as replicas, need to be counted only once.
    loads = np.stack(
        [np.frombuffer(column, dtype=np.int64) for column in dict.fromkeys(map(bytes, np.ascontiguousarray(loads.T)))],
        1,
    )
    total = (np.bincount(parts, minlength=len(loads)) @ loads).max()
    bounds = np.linspace(0, len(parts), int(total / bucket_bytes * BLOCKS_PER_WAVE) + 2, dtype=np.int64)
    pending = list(pairwise(np.unique(bounds).tolist()))[::-1]
    ends = []
    load = np.zeros(loads.shape[1], dtype=np.int64)
    while pending:
        begin, end = pending.pop()
        block = loads[parts[begin:end]].sum(axis=0)
        if (load + block).max() <= bucket_bytes:
            load = load + block
        elif end - begin > 1:
            middle = (begin + end) // 2
            pending += [(middle, end), (begin, middle)]
        else:
            ends.append(begin)
            load = block
    return [*ends, len(parts)]
