"""Environments of many turns: their protocol, the processes that they live in, and the episodes that policies play."""
