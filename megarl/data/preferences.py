"""Pairs of answers of which one is preferred, from parquet files, as records the learner already knows."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarl.batch import Preferences
from megarl.data.config import PreferenceDataSection
from megarl.data.conversations import Conversations, to_be_scored
from megarl.data.messages import as_read
from megarl.data.order import Order
from megarl.data.parquet import Rows
from megarl.distributed.exchange import in_shares


class PreferenceStream:
    """The pairs of parquet files in batches: endless and shuffled by epoch for training, once through for validation.

    Each answer is read behind its prompt by `reader`, as it will be where the model is used. Pairs are tokenised when
    they are asked for, and all are looked through once, here, all ranks of a job together. Raises ValueError for a row
    that is no pair.
    """

    def __init__(self, section: PreferenceDataSection, files: str | Sequence[str], reader: Conversations) -> None:
        self._section = section
        self._reader = reader
        columns = [section.prompt_key, section.chosen_key, section.rejected_key]
        if section.margin_key is not None:
            columns.append(section.margin_key)
        self._rows = Rows(files, columns=columns)
        self._order = Order(
            self._rows.chunks, batch_size=section.train_batch_size, shuffle=section.shuffle, seed=section.seed
        )
        in_shares(len(self._rows), self._look_through)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises ValueError where there is not one."""
        return self._order.steps_per_epoch

    def take(self, step: int) -> Preferences:
        """The pairs of a step, counted from 0 over all epochs; what fills no batch at an epoch's end is left out."""
        rows, _ = self._order.take(self._order.position_of(step))
        return self._record(rows)

    def first_as_read(self, step: int) -> str:
        """Describe for people how the model reads the first preferred response of a step."""
        rows, _ = self._order.take(self._order.position_of(step), 1)
        row = self._rows[rows[0]]
        prompt = row[self._section.prompt_key]
        token_ids = self._read(rows[0], prompt, row[self._section.chosen_key])
        return as_read("the first prompt with its preferred response", prompt, token_ids, self._reader.tokenizer)

    def batches(self) -> Iterator[Preferences]:
        """Every pair once, in file order; the last batch may be smaller."""
        return map(self._record, self._order.once_through())

    def _look_through(self, share: range) -> None:
        for index, row in zip(share, self._rows.scan(share), strict=True):
            self._check(index, row)

    def _check(self, index: int, row: dict[str, Any]) -> None:
        for key in (self._section.chosen_key, self._section.rejected_key):
            if not isinstance(row[key], str) or not row[key]:
                raise ValueError(f"{self._rows.place(index)}, column {key}: a text is expected, not {row[key]!r}")
        margin = self._margin(row)
        if not isinstance(margin, (int, float)) or not math.isfinite(margin):
            column = self._section.margin_key
            raise ValueError(f"{self._rows.place(index)}, column {column}: a number is expected, not {margin!r}")

    def _margin(self, row: dict[str, Any]) -> Any:
        return 0.0 if self._section.margin_key is None else row[self._section.margin_key]

    def _record(self, indices: Sequence[int]) -> Preferences:
        sequences, margins = [], []
        for index in indices:
            row = self._rows[index]
            for key in (self._section.chosen_key, self._section.rejected_key):
                sequences.append(self._read(index, row[self._section.prompt_key], row[key]))
                margins.append(float(self._margin(row)))
        return to_be_scored(sequences).extend(Preferences, margins=torch.tensor(margins))

    def _read(self, index: int, prompt: Any, answer: str) -> list[int]:
        try:
            return self._reader.encode(prompt, answer)
        except ValueError as error:
            raise ValueError(f"{self._rows.place(index)}: {error}") from error
