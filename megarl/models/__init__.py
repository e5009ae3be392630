"""Model families: architectures, names and places of weights, and where checkpoints come from."""
