"""Sizes of the head's chunks. Plans read them without importing Megatron."""

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at the same time."""
KEPT_BYTES = 2**29
"""Bytes of logits that a rank always keeps for the backward pass of a micro-batch."""
