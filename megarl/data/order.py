"""Which rows make which batch: a pure function of a seed and a position, so that a run resumes from two integers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: it has taken `offset` rows of epoch `epoch`, and all epochs before."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of `num_rows` rows in batches of `batch_size`; shuffled, each epoch has an order of its own."""

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises ValueError where there is not one."""
        self._require(self.batch_size)
        return self.num_rows // self.batch_size

    def position_of(self, step: int) -> Position:
        """Where a run stands that has taken `step` batches, each of `batch_size` rows."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return Position(epoch, batch * self.batch_size)

    def take(self, position: Position, count: int) -> tuple[Sequence[int], Position]:
        """The next `count` rows, all of one epoch, and the position behind them.

        Where the epoch has fewer left, the next one begins; what fills no batch at an epoch's end is left out. Raises
        ValueError where no epoch has so many.
        """
        self._require(count)
        epoch, start = position.epoch, position.offset
        if start + count > self.num_rows:
            epoch, start = epoch + 1, 0
        stop = start + count
        rest_fills_a_batch = self.num_rows - stop >= self.batch_size
        return self._rows(epoch, start, stop), Position(epoch, stop) if rest_fills_a_batch else Position(epoch + 1)

    def once_through(self) -> Iterator[Sequence[int]]:
        """Every row once, in file order; the last batch may be smaller."""
        for start in range(0, self.num_rows, self.batch_size):
            yield range(start, min(start + self.batch_size, self.num_rows))

    def _rows(self, epoch: int, start: int, stop: int) -> Sequence[int]:
        if not self.shuffle:
            return range(start, stop)
        order = np.random.default_rng((self.seed % 2**32, epoch)).permutation(self.num_rows)
        rows: list[int] = order[start:stop].tolist()
        return rows

    def _require(self, count: int) -> None:
        if count > self.num_rows:
            raise ValueError(
                f"data.train_batch_size is {count}, and the training files hold {self.num_rows} rows: "
                "lower it or give more data"
            )
