"""Seeds that follow from numbers, equal on every machine."""

import hashlib
import struct


def seed_of(*numbers: int) -> int:
    """Return the seed, in [0, 2^63), that belongs to these numbers of 64 bits in this order."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
