"""Pairs of a preferred and a rejected response from data files, for training a reward model."""

from collections.abc import Sequence
from typing import Any

import torch

from megarl.batch import Preferences
from megarl.data.config import PreferenceDataSection
from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.messages import as_read, margin_faults, text_faults
from megarl.data.stream import FileStream
from megarl.data.table import DataRow
from megarl.platform.errors import UserError, placed


class PreferenceStream(FileStream[Preferences]):
    """The pairs of data files. `reader` encodes each response after its prompt, as it does when the model is used."""

    def __init__(self, section: PreferenceDataSection, files: str | Sequence[str], reader: Conversations) -> None:
        self._section = section
        self._reader = reader
        keys = ("prompt_key", "chosen_key", "rejected_key", "margin_key")
        super().__init__(section, files, reader.tokenizer, keys)

    def _preview(self, row: DataRow) -> str:
        token_ids = self._read(row, row[self._section.chosen_key])
        what = "the first prompt with its preferred response"
        return as_read(what, row[self._section.prompt_key], token_ids, self._reader.tokenizer)

    def _check(self, row: DataRow) -> None:
        for key in (self._section.chosen_key, self._section.rejected_key):
            for fault in text_faults(row[key], may_be_empty=False):
                raise UserError(f"column {key}: {fault}")
            self._read(row, row[key])
        margin = self._margin(row)
        for fault in margin_faults(margin):
            raise UserError(f"column {self._section.margin_key}: {fault}")
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
        with placed(f"column {self._section.prompt_key}: "):
            return self._reader.encode(row[self._section.prompt_key], response)
