"""Extracts the answer of a response from its `<answer>...</answer>` tags. Both functions take linear time."""

_OPEN = "<answer>"
_CLOSE = "</answer>"


def answer_of(text: str) -> tuple[str, bool]:
    """Return the answer, and whether it is in its tags; without tags, the answer is the last line that is not empty.

    The last pair of tags counts, from the last opening tag that is closed. An empty response has the answer ''.
    """
    start = text.rfind(_OPEN, 0, max(text.rfind(_CLOSE), 0))
    if start >= 0:
        start += len(_OPEN)
        return text[start : text.index(_CLOSE, start)], True
    lines = text.strip().splitlines()
    return (lines[-1] if lines else ""), False


def last_of_pairs(text: str) -> str | None:
    """Return the content of the last pair of tags, paired from the left: it may have a second opening tag."""
    *closed, _ = text.split(_CLOSE)
    answers = (part.partition(_OPEN) for part in reversed(closed))
    return next((answer for _, opened, answer in answers if opened), None)
