"""The rows of data files in batches, for runs that learn from files alone."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from megarl.batch import Rollouts
from megarl.data.census import Census
from megarl.data.config import SupervisedDataSection
from megarl.data.order import Order
from megarl.data.row_checks import check_rows
from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.data.tokenizer import Tokenizer

Batch = TypeVar("Batch", bound=Rollouts, covariant=True)


class FileStream(ABC, Generic[Batch]):
    """The pairs of data files in batches: endless and shuffled by epoch for training, once through for validation.

    Pairs are read and encoded when they are taken; the constructor checks all of them once, on all ranks together.
    """

    def __init__(
        self, section: SupervisedDataSection, files: str | Sequence[str], tokenizer: Tokenizer, keys: Sequence[str]
    ) -> None:
        """Open files whose columns the `keys` of the section name. Collective. Raises UserError for an invalid row."""
        columns = {key: getattr(section, key) for key in keys}
        remedies = {column: f"data.{key} names another" for key, column in columns.items() if column}
        self._rows = Rows(files, columns=list(remedies), remedies=remedies)
        self._order = Order(
            len(self._rows), batch_size=section.train_batch_size, shuffle=section.shuffle, seed=section.seed
        )
        self._census = Census(tokenizer)
        check_rows(self._rows, self._check)
        self._remark = self._census.conclude_together()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises UserError if there is none."""
        return self._order.steps_per_epoch

    def take(self, step: int) -> Batch:
        """Return the pairs of a step, counted from 0 over all epochs; the incomplete batch of an epoch is dropped."""
        rows, _ = self._order.take(self._order.position_of(step))
        return self._record(rows)

    def preview_prompt(self, step: int) -> str:
        """Describe how the model reads the first pair of a step, and remark on all rows."""
        rows, _ = self._order.take(self._order.position_of(step), 1)
        return f"{self._preview(self._rows[rows[0]])}{self._remark}"

    def batches(self) -> Iterator[Batch]:
        """Yield every pair once, in file order; the last batch may be smaller."""
        return map(self._record, self._order.once_through())

    @abstractmethod
    def _check(self, row: DataRow) -> None:
        """Check a row, and let the census see it. Raises UserError for a fault."""

    @abstractmethod
    def _preview(self, row: DataRow) -> str:
        """Describe how the model reads a pair."""

    @abstractmethod
    def _record(self, indices: Sequence[int]) -> Batch:
        """Return the pairs of these rows."""
