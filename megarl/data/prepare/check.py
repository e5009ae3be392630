"""Checks a data file of prompts, or of preference pairs, row by row."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from megarl.data.columns import BY_SOURCE, REWARD_MODEL, PromptColumns, as_mapping
from megarl.data.config import DataSection
from megarl.data.messages import prompt_faults, text_faults
from megarl.data.rows import Rows
from megarl.errors import UserError
from megarl.rewards import reward_of

STYLES = ("rule", "model")
PAIR = ("chosen", "rejected")

_PROBE = "#### 0\n<answer>0</answer>"
"""A response with an answer for every built-in reward, so that the reward reads the ground truth."""

COLUMNS = PromptColumns(section=DataSection(train_files=""), needs=BY_SOURCE)
"""Prompts as a run reads them by default."""


def faults(file: str, columns: PromptColumns = COLUMNS) -> Iterator[str]:
    """Yield one line for each fault, beginning with the file and, if rows have it, the first of them and their number.

    `columns` reads prompts; preference pairs do not need it.
    """
    first, counts = dict[str, str](), Counter[str]()
    unreadable = ""
    try:
        if _holds_preferences(file):
            rows, faults_of = Rows(file, columns=("prompt", *PAIR), optional=("margin",)), _faults_of_pair
        else:
            rows, faults_of = columns.open(file), lambda row: _faults_of_prompt_row(row, columns)
        for index, row in enumerate(rows):
            for fault in faults_of(row):
                first.setdefault(fault, rows.place(index))
                counts[fault] += 1
    except UserError as error:
        unreadable = str(error)
    for fault, place in first.items():
        others = f" and {counts[fault] - 1:,} more" if counts[fault] > 1 else ""
        yield f"{place}{others}, {fault}"
    if unreadable:
        yield unreadable


def _holds_preferences(file: str) -> bool:
    """Return whether the file has a column of preference pairs."""
    try:
        return any(Rows(file, columns=(), optional=PAIR)[0])
    except UserError:
        return False


def _faults_of_pair(row: dict[str, Any]) -> Iterator[str]:
    yield from (f"prompt: {fault}" for fault in prompt_faults(row["prompt"]))
    for column in PAIR:
        yield from (f"{column}: {fault}" for fault in text_faults(row[column], may_be_empty=False))
    if row["chosen"] == row["rejected"]:
        yield "chosen, rejected: both are the same text, so neither is preferred"
    margin = row.get("margin", 0.0)
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        yield f"margin: a finite number is expected, not {margin!r}"


def _faults_of_prompt_row(row: dict[str, Any], columns: PromptColumns) -> Iterator[str]:
    found = list(columns.faults(row))
    yield from found
    if found or not columns.needs.source:
        return
    style = as_mapping(row[REWARD_MODEL]).get("style", "rule")
    if style not in STYLES:
        yield f"reward_model.style: {style!r} is none of {', '.join(STYLES)}"
    source, truth, reward = columns.source(row), columns.ground_truth(row), reward_of(columns.source(row))
    if style != "rule" or reward is None:
        return
    try:
        reward(source, _PROBE, truth, columns.extra_info(row))
    except Exception as error:  # any error of the reward is a fault of this row
        yield f"reward_model.ground_truth: {truth!r} does not fit the reward of {source!r} ({error!r})"
