"""The rows of each batch: a pure function of a seed and a position, so a run resumes from two integers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megarl.data.permutation import permuted
from megarl.platform.errors import UserError

MOST_DRAWN = 1 << 16
"""Rows whose order is drawn as a whole. The order of more rows is computed as far as it is taken."""


@dataclass(frozen=True)
class Position:
    """A run's position in the data: it has taken all earlier epochs, and `offset` rows of epoch `epoch`."""

    epoch: int = 0
    offset: int = 0


class Order:
    """The order of `num_rows` rows in batches of `batch_size`; if shuffled, a different order in each epoch."""

    def __init__(self, num_rows: int, *, batch_size: int | None, shuffle: bool, seed: int) -> None:
        """Set up the order; a `batch_size` of None means all rows."""
        self._shuffle = shuffle
        self._seed = seed % 2**32
        self._permutation = lru_cache(maxsize=1)(self._draw)
        self.num_rows = num_rows
        self.batch_size = batch_size or num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises UserError if there is none."""
        self.require(self.batch_size)
        return self.num_rows // self.batch_size

    def position_of(self, step: int) -> Position:
        """Return the position after `step` batches of `batch_size` rows."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return Position(epoch, batch * self.batch_size)

    def take(self, position: Position, count: int | None = None) -> tuple[Sequence[int], Position]:
        """Return the next `count` rows (None: a batch), all of one epoch, and the position after them.

        If the epoch has fewer rows left, the next epoch begins; rows that do not fill a batch at the end of an epoch
        are dropped. Raises UserError if an epoch has fewer than `count` rows.
        """
        count = self.batch_size if count is None else count
        self.require(count)
        epoch = position.epoch
        start = position.offset
        if start + count > self.num_rows:
            epoch += 1
            start = 0
        stop = start + count
        rest_fills_a_batch = self.num_rows - stop >= self.batch_size
        return self._rows(epoch, start, stop), Position(epoch, stop) if rest_fills_a_batch else Position(epoch + 1)

    def once_through(self) -> Iterator[Sequence[int]]:
        """Yield every row once, in batches in file order; the last batch may be smaller."""
        for start in range(0, self.num_rows, self.batch_size):
            yield range(start, min(start + self.batch_size, self.num_rows))

    def _rows(self, epoch: int, start: int, stop: int) -> Sequence[int]:
        """Return rows `start .. stop` of an epoch's order."""
        if not self._shuffle:
            return range(start, stop)
        key = (self._seed, epoch, 0)
        if self.num_rows > MOST_DRAWN:
            rows = permuted(np.arange(start, stop), self.num_rows, key=key)
        else:
            rows = self._permutation(key)[start:stop]
        return list(map(int, rows))

    def _draw(self, key: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the order of all rows in an epoch."""
        return np.random.default_rng(key).permutation(self.num_rows)

    def require(self, count: int) -> None:
        """Raise UserError if an epoch has fewer than `count` rows."""
        if count > self.num_rows:
            at_once = "" if count == self.batch_size else f", so that a step draws {count} prompts"
            raise UserError(
                f"data.train_batch_size is {self.batch_size}{at_once}, but the training files have {self.num_rows} "
                "rows: lower it or give more data"
            )
