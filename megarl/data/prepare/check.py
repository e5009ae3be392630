"""What is wrong with a parquet file of prompts, or of preference pairs, by row."""

import math
from collections.abc import Iterator
from typing import Any

from megarl.data.parquet import Rows
from megarl.rewards import reward_of

ROLES = ("system", "user", "assistant", "tool")
STYLES = ("rule", "model")
PAIR = ("chosen", "rejected")

_PROBE = "#### 0\n<answer>0</answer>"
"""An answer in the format of every built-in reward that asks something of the ground truth, so that it looks at it."""


def faults(file: str) -> Iterator[str]:
    """One line for each fault, beginning with the file and, where it is one row's, the row."""
    try:
        if _holds_preferences(file):
            rows, faults_of = Rows(file, columns=("prompt", *PAIR), optional=("margin",)), _faults_of_pair
        else:
            columns = ("prompt", "data_source", "reward_model")
            rows, faults_of = Rows(file, columns=columns, optional=("ability", "extra_info")), _faults_of_prompt_row
    except ValueError as error:
        yield str(error)
        return
    for index, row in enumerate(rows):
        yield from (f"{rows.place(index)}, {fault}" for fault in faults_of(row))


def _holds_preferences(file: str) -> bool:
    """Whether the file has a column that only preference pairs have."""
    try:
        return any(Rows(file, columns=(), optional=PAIR)[0])
    except ValueError:
        return False


def _faults_of_pair(row: dict[str, Any]) -> Iterator[str]:
    yield from _faults_of_prompt(row["prompt"])
    for column in PAIR:
        if not isinstance(row[column], str) or not row[column]:
            yield f"{column}: a text is expected, not {row[column]!r}"
    if row["chosen"] == row["rejected"]:
        yield "chosen, rejected: both are the same text, which prefers nothing"
    margin = row.get("margin", 0.0)
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        yield f"margin: a finite number is expected, not {margin!r}"


def _faults_of_prompt_row(row: dict[str, Any]) -> Iterator[str]:
    yield from _faults_of_prompt(row["prompt"])
    yield from _faults_of_reward(row)
    for column, kind in (("ability", str), ("extra_info", dict)):
        value = row.get(column)
        if value is not None and not isinstance(value, kind):
            yield f"{column}: {'a text' if kind is str else 'a struct'} is expected, not {value!r}"


def _faults_of_prompt(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, str):
        if not prompt:
            yield "prompt: the text is empty"
        return
    if not isinstance(prompt, list) or not prompt:
        yield f"prompt: {prompt!r} is neither a text nor a list of messages"
        return
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            yield f"prompt, message {number}: {message!r} is not {{role, content}} with a text as content"
        elif message.get("role") not in ROLES:
            yield f"prompt, message {number}: role {message.get('role')!r} is none of {', '.join(ROLES)}"


def _faults_of_reward(row: dict[str, Any]) -> Iterator[str]:
    source, model = row["data_source"], row["reward_model"]
    if not isinstance(source, str) or not source:
        yield f"data_source: {source!r} is no text"
        return
    if not isinstance(model, dict) or "ground_truth" not in model:
        yield f"reward_model: {model!r} has no ground_truth"
        return
    style = model.get("style", "rule")
    if style not in STYLES:
        yield f"reward_model.style: {style!r} is none of {', '.join(STYLES)}"
    if style != "rule":
        return
    if (reward := reward_of(source)) is None:
        yield f"data_source: no built-in reward for {source!r}; set custom_reward_function.path where this file is used"
        return
    truth = model["ground_truth"]
    try:
        reward(source, _PROBE, truth, row.get("extra_info") or {})
    except Exception as error:  # whatever a reward stumbles over is a fault of this row
        yield f"reward_model.ground_truth: {truth!r} does not suit the reward of {source!r} ({error!r})"
