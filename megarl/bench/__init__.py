"""Measurements of reshard, planning and checkpoints: `python -m megarl.bench`."""
