"""Dropout that no split changes: a hash of the token, the column and the update decides, not a random generator.

A token has a key, which follows from its place in its sample and from all tokens of the sample. So every rank draws
alike for the tokens and the columns that it has, and a backward pass that computes activations again draws the same.
"""

import zlib

import torch
from torch import Tensor

from megarl.learner.recomputed import PerMicroBatch


class TokenDropout:
    """Dropout of the input of one linear layer."""

    def __init__(self, rate: float, layer: str, columns: Tensor, *, tp_rank: int, tp_size: int) -> None:
        """Make a dropout that draws no update yet.

        Args:
            rate: the share of numbers that become zero.
            layer: its name, which tells its numbers from those of other layers.
            columns: [C] int32, the numbers of this rank's columns in the whole input.
            tp_rank: this rank's part of the tokens under sequence parallelism.
            tp_size: the number of parts.
        """
        self.keys = PerMicroBatch()
        """[N] int32, of the tokens, as in `Packed`."""
        self.rate = rate
        self._layer = layer
        self._columns = columns
        self._salted = columns
        self._part = tp_rank, tp_size

    def begin(self, update: str) -> None:
        """Draw other numbers from here on. `update` names a forward and backward pass of a global batch."""
        self.keys.clear()
        salt = zlib.crc32(f"{self._layer} {update}".encode()) - (1 << 31)
        self._salted = mixed(mixed(self._columns) + salt)

    def __call__(self, hidden: Tensor, *, is_training: bool) -> Tensor:
        """Return [n, ..., C] states with some zeros, and the others enlarged; the states themselves without keys."""
        keys = self.keys.take(is_training=is_training)
        if keys is None or not is_training:
            return hidden
        if len(keys) != len(hidden):
            rank, size = self._part
            keys = keys.chunk(size)[rank]
        dropped = is_dropped(keys, self._salted, self.rate).view(hidden.shape)
        return hidden.masked_fill(dropped, 0.0) / (1.0 - self.rate)


def token_keys(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return the keys [N] int32 of tokens [N] of samples that lie end to end, of `lengths` [S] int64 each."""
    starts = lengths.cumsum(0) - lengths
    positions = mixed(torch.arange(len(tokens)) - starts.repeat_interleave(lengths))
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    digests = torch.zeros(len(lengths), dtype=torch.int64).index_add(0, sample, mixed(tokens ^ positions).long())
    return mixed(mixed(digests)[sample] ^ positions)


def is_dropped(keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return [N, C] bool, True with the probability `rate`, less than 1, of tokens [N] and columns [C] int32."""
    num_dropped = min(round(rate * (1 << 32)), (1 << 32) - 1)  # of the hashes; one more is no int32 below
    return mixed(keys[:, None] ^ columns) < num_dropped - (1 << 31)


def mixed(numbers: Tensor) -> Tensor:
    """Return a hash of integers, int32: a bijection of their last 32 bits, by xor-shifts and products.

    The constants are those of lowbias32 (C. Wellons, Hash Function Prospector, 2018).
    """
    bits = numbers.to(torch.int32)
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return bits ^ (bits >> 16 & 0xFFFF)
