"""Arithmetic on columns that list runs of elements one after the other."""

import numpy as np

from megarl.columns import Integers


def starts(counts: Integers) -> Integers:
    """Return the first index of each run, if runs of these lengths follow one another: 2 1 3 gives 0 2 3."""
    return np.cumsum(counts) - counts


def count_up(counts: Integers) -> Integers:
    """Return the index of each element within its run, for runs of these lengths: 2 1 3 gives 0 1 0 0 1 2."""
    return np.arange(counts.sum()) - np.repeat(starts(counts), counts)
