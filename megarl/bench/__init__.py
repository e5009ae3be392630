"""Measurements of reshard, planning and checkpoints: `megarl bench`."""
