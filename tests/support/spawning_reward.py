"""A custom reward that calls its own function in processes that it starts anew."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any


class Length:
    """A value that has to travel into the process and back."""

    def __init__(self, text: str) -> None:
        """Measure a text."""
        self.number = len(text)


def measure(text: str) -> Length:
    """Return the length of a text."""
    return Length(text)


def compute_score(solution_str: str, ground_truth: Any, **_: Any) -> float:
    """Return the length of the response, from a process that starts by the method that the row names."""
    context = multiprocessing.get_context(ground_truth)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return float(pool.submit(measure, solution_str).result().number)
