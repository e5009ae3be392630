"""Format: a response has its thoughts in `<think>` tags, then its answer in `<answer>` tags, and nothing else."""

from collections.abc import Mapping
from typing import Any

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the response is thoughts and an answer, not empty, tagged and in this order, else 0.0.

    The opening `<think>` may be missing: many prompts end in it. The ground truth is ignored.
    """
    text = solution_str.strip()
    if not text.startswith(_TAGS[0]):
        text = _TAGS[0] + text
    if not text.endswith(_TAGS[3]) or any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    thoughts, found, rest = text.removeprefix(_TAGS[0]).removesuffix(_TAGS[3]).partition(_TAGS[1])
    between, opened, answer = rest.partition(_TAGS[2])
    return float(bool(found and opened and thoughts.strip() and answer.strip()) and not between.strip())
