"""Pairs of a preferred and a rejected response from data files, for training a reward model."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarl.batch import Preferences
from megarl.data.census import Census
from megarl.data.config import PreferenceDataSection
from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.look import check_rows
from megarl.data.messages import as_read, text_faults
from megarl.data.order import Order
from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.platform.errors import UserError


class PreferenceStream:
    """The pairs of data files in batches: endless and shuffled by epoch for training, once through for validation.

    `reader` encodes each response after its prompt, as it does when the model is used. Pairs are tokenised when they
    are taken; the constructor checks all of them once, on all ranks together. It raises UserError for an invalid row.
    """

    def __init__(self, section: PreferenceDataSection, files: str | Sequence[str], reader: Conversations) -> None:
        self._section = section
        self._reader = reader
        names = ("prompt_key", "chosen_key", "rejected_key", "margin_key")
        remedies = {column: f"data.{name} names another" for name in names if (column := getattr(section, name))}
        self._rows = Rows(files, columns=list(remedies), remedies=remedies)
        self._order = Order(
            len(self._rows), batch_size=section.train_batch_size, shuffle=section.shuffle, seed=section.seed
        )
        self._census = Census(reader.tokenizer)
        check_rows(self._rows, self._check)
        self._remark = self._census.conclude_together()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises UserError if there is none."""
        return self._order.steps_per_epoch

    def take(self, step: int) -> Preferences:
        """Return the pairs of a step, counted from 0 over all epochs; the incomplete batch of an epoch is dropped."""
        rows, _ = self._order.take(self._order.position_of(step))
        return self._record(rows)

    def preview_prompt(self, step: int) -> str:
        """Describe how the model reads the first preferred response of a step, and remark on all rows."""
        rows, _ = self._order.take(self._order.position_of(step), 1)
        row = self._rows[rows[0]]
        token_ids = self._read(row, row[self._section.chosen_key])
        tokenizer = self._reader.tokenizer
        what = "the first prompt with its preferred response"
        return f"{as_read(what, row[self._section.prompt_key], token_ids, tokenizer)}{self._remark}"

    def batches(self) -> Iterator[Preferences]:
        """Yield every pair once, in file order; the last batch may be smaller."""
        return map(self._record, self._order.once_through())

    def _check(self, row: DataRow) -> None:
        for key in (self._section.chosen_key, self._section.rejected_key):
            for fault in text_faults(row[key], may_be_empty=False):
                raise UserError(f"column {key}: {fault}")
            self._read(row, row[key])
        margin = self._margin(row)
        if not isinstance(margin, (int, float)) or not math.isfinite(margin):
            raise UserError(f"column {self._section.margin_key}: a number is expected, not {margin!r}")
        responses = (row[key] for key in (self._section.chosen_key, self._section.rejected_key))
        self._census.see(row[self._section.prompt_key], *responses)

    def _margin(self, row: DataRow) -> Any:
        return 0.0 if self._section.margin_key is None else row[self._section.margin_key]

    def _record(self, indices: Sequence[int]) -> Preferences:
        sequences = []
        margins = []
        for index in indices:
            row = self._rows[index]
            for key in (self._section.chosen_key, self._section.rejected_key):
                sequences.append(self._read(row, row[key]))
                margins.append(float(self._margin(row)))
        return scoring_batch(sequences).extend(Preferences, margins=torch.tensor(margins))

    def _read(self, row: DataRow, response: str) -> list[int]:
        try:
            return self._reader.encode(row[self._section.prompt_key], response)
        except UserError as error:
            raise UserError(f"column {self._section.prompt_key}: {error}") from error
