"""A hash of whole numbers, many at once."""

import numpy as np
from numpy.typing import NDArray

INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""Between the numbers that SplitMix64 hashes one after the other. Zeros need it: their hash is zero."""


def hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number: the finaliser of SplitMix64 (Steele, Lea and Flood 2014). Each bit changes half."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
