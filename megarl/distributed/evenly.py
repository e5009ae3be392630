"""Deals items to parts, one after the other, each to the part that has least."""

import heapq

import numpy as np

from megarl.columns import Integers

SHORT = 16  # steps that a heap takes in less time than numpy
RUN = 256  # steps that a heap takes at least


def deal(loads: Integers, sizes: Integers) -> Integers:
    """Return the part that gets each item, one item after the other: the part with the least load, the first of equals.

    `loads`, `[P]`, are those before the first item. `sizes`, `[n]`, are not negative.
    """
    num_parts = len(loads)
    return fill_evenly(loads * num_parts + np.arange(num_parts), sizes * num_parts) % num_parts


def fill_evenly(parts: Integers, steps: Integers) -> Integers:
    """Add each step to the least part, one after the other; return the parts before their steps, of all steps.

    In ascending parts, the next steps go to one part after the other, as long as no part that has got one is less than
    the next. If that ends soon, a heap takes the next steps.
    """
    found = np.empty_like(steps)
    done = 0
    while done < len(steps):
        parts = np.sort(parts)
        count = min(len(parts), len(steps) - done)
        grown = parts[:count] + steps[done : done + count]
        if parts[count - 1] >= grown.min():
            is_next = parts[1:count] < np.minimum.accumulate(grown)[:-1]
            count = count if is_next.all() else int(is_next.argmin()) + 1
        found[done : done + count] = parts[:count]
        parts[:count] = grown[:count]
        done += count
        if count < SHORT:
            heap = np.sort(parts).tolist()
            for place in range(done, min(done + max(len(parts), RUN), len(steps))):
                found[place] = heap[0]
                heapq.heapreplace(heap, heap[0] + int(steps[place]))
                done += 1
            parts = np.array(heap)
    return found
