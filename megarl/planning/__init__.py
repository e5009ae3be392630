"""Predicts the memory and the traffic of a run from the sizes of its models: `megarl plan`."""
