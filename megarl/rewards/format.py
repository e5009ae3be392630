"""Format: a response has its thoughts in `<think>` tags, then its answer in `<answer>` tags, and nothing else."""

from collections.abc import Mapping

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Return 1.0 if the response is thoughts and an answer, tagged and in this order, else 0.0.

    Both need a letter or a digit. The opening `<think>` may be missing: many prompts end in it. The ground truth is
    ignored.
    """
    text = solution_str.strip()
    if not text.startswith(_TAGS[0]):
        text = _TAGS[0] + text
    if not text.endswith(_TAGS[3]) or any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    thoughts, found, rest = text.removeprefix(_TAGS[0]).removesuffix(_TAGS[3]).partition(_TAGS[1])
    between, opened, answer = rest.partition(_TAGS[2])
    is_whole = found and opened and not between.strip()
    return float(bool(is_whole) and _says_something(thoughts) and _says_something(answer))


def right_answer(ground_truth: object) -> str:
    """Return a response that scores 1.0, whatever the ground truth is."""
    return "<think>The form alone counts.</think><answer>1</answer>"


def _says_something(text: str) -> bool:
    return any(character.isalnum() for character in text)
