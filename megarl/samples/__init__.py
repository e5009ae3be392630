"""Samples outside of memory: those of finished steps, of the running step, and those that continue in the next step."""
