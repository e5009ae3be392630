"""Writes a launch of another trainer as a configuration of megarl: `megarl convert SCRIPT`. It runs no script."""
