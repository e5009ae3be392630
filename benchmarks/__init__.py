"""Measurements of a step, a sync, a save, a plan, next to other libraries: `python -m benchmarks`."""

PROGRAM = "python -m benchmarks"
