"""The training loops and their parts, from the samples of a step to the objectives that the models minimise."""
