"""Which rows make which batch: a pure function of a seed and a step, so that a run resumes with nothing to restore."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


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
        steps = self.num_rows // self.batch_size
        if steps == 0:
            raise ValueError(
                f"data.train_batch_size is {self.batch_size}, and the training files hold {self.num_rows} rows: "
                "lower it or give more data"
            )
        return steps

    def batch(self, step: int) -> Sequence[int]:
        """The rows of a step, counted from 0 over all epochs; what fills no batch at an epoch's end is left out."""
        epoch, position = divmod(step, self.steps_per_epoch)
        rows: Sequence[int] = range(self.num_rows)
        if self.shuffle:
            rows = np.random.default_rng((self.seed % 2**32, epoch)).permutation(self.num_rows).tolist()
        return rows[position * self.batch_size : (position + 1) * self.batch_size]

    def once_through(self) -> Iterator[Sequence[int]]:
        """Every row once, in file order; the last batch may be smaller."""
        for start in range(0, self.num_rows, self.batch_size):
            yield range(start, min(start + self.batch_size, self.num_rows))
