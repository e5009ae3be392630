"""The answer of a response: what stands in its `<answer>...</answer>`. Both readings take linear time."""

_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_of(text: str) -> tuple[str, bool]:
    """The answer and whether it is in its tags; without tags, it is the last line that is not empty, or ''.

    Of several pairs of tags the last one counts, from the last opening tag that is closed.
    """
    start = text.rfind(_OPEN, 0, max(text.rfind(_CLOSE), 0))
    if start >= 0:
        start += len(_OPEN)
        return text[start : text.index(_CLOSE, start)], True
    lines = text.strip().splitlines()
    return (lines[-1] if lines else ""), False


def last_of_pairs(text: str) -> str | None:
    """What stands in the last pair of tags, paired from the left: a second opening tag in a pair is part of it."""
    answer, position = None, 0
    while (start := text.find(_OPEN, position)) >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        answer, position = text[start:end], end + len(_CLOSE)
    return answer
