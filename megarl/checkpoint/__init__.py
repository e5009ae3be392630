"""Keeps what outlives the process: saves, mirrors, finds and checks checkpoints."""
