"""The rows of each batch: a pure function of a seed and a position, so a run resumes from two integers.

Neighbouring rows are read together (a `Chunk`), and only some chunks fit in memory at a time. So an epoch draws an
order of all chunks, divides it into windows that fit in memory, and draws an order of all rows in each window. If all
chunks fit, they are one window, and its order is a permutation of all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.platform.errors import UserError

WINDOW_BYTES = 256 << 20
"""Size of a window: half of a reader's cache, as a chunk is larger in memory than in its file."""


@dataclass(frozen=True)
class Position:
    """A run's position in the data: it has taken all earlier epochs, and `offset` rows of epoch `epoch`."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Neighbouring rows that are read together."""

    num_rows: int
    num_bytes: int  # as the file states it, so that the order does not depend on the reader


class Order:
    """The order of the rows of `chunks` in batches of `batch_size`; if shuffled, a different order in each epoch."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        batch_size: int | None,
        shuffle: bool,
        seed: int,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Set up the order; a `batch_size` of None means all rows."""
        self._chunks = chunks
        self._shuffle = shuffle
        self._seed = seed % 2**32
        self._window_bytes = window_bytes
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in chunks)])
        self.num_rows = int(self._starts[-1])
        self.batch_size = batch_size or self.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises UserError if there is none."""
        self._require(self.batch_size)
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
        self._require(count)
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
        """Return rows `start .. stop` of an epoch's order; only the windows with these rows are drawn."""
        if not self._shuffle:
            return range(start, stop)
        rows: list[int] = []
        first = 0
        for number, window in enumerate(self._windows(epoch)):
            end = first + sum(self._chunks[chunk].num_rows for chunk in window)
            if first < stop and start < end:
                inside = np.concatenate([np.arange(self._starts[chunk], self._starts[chunk + 1]) for chunk in window])
                drawn = np.random.default_rng((self._seed, epoch, number)).permutation(inside)
                rows += drawn[max(start - first, 0) : stop - first].tolist()
            first = end
        return rows

    def _windows(self, epoch: int) -> list[list[int]]:
        """Return the chunks of each window."""
        chunks = range(len(self._chunks))
        if sum(chunk.num_bytes for chunk in self._chunks) <= self._window_bytes:
            return [list(chunks)]
        windows: list[list[int]] = []
        room = -1  # the first chunk starts a window
        for chunk in np.random.default_rng((self._seed, epoch, 0, 1)).permutation(len(chunks)).tolist():
            if self._chunks[chunk].num_bytes > room:
                windows.append([])
                room = self._window_bytes
            windows[-1].append(chunk)
            room -= self._chunks[chunk].num_bytes
        return windows

    def _require(self, count: int) -> None:
        if count > self.num_rows:
            raise UserError(
                f"data.train_batch_size is {count}, but the training files have {self.num_rows} rows: "
                "lower it or give more data"
            )
