"""The answer of a response: what stands in its last `<answer>...</answer>`."""

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_of(text: str) -> tuple[str, bool]:
    """The answer and whether it is in its tags; without tags, it is the last line that is not empty, or ''."""
    tagged: list[str] = _TAGGED.findall(text)
    if tagged:
        return tagged[-1], True
    lines = text.strip().splitlines()
    return (lines[-1] if lines else ""), False
