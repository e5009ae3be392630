"""Validation samples before and now: the same prompt in an earlier and in a later validation, side by side."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.tracking.protocol import Row

GENERATIONS = "val/generations"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two responses to a prompt. A score is None if the reward failed."""

    prompt: str
    before: str
    now: str
    score_before: float | None
    score_now: float | None

    @property
    def change(self) -> float:
        """The later score less the earlier score; 0 if a score is missing."""
        if self.score_before is None or self.score_now is None:
            return 0.0
        return self.score_now - self.score_before

    def cells(self) -> dict[str, object]:
        """Return the columns of a table for people."""
        return {
            "prompt": self.prompt,
            "before": self.before,
            "now": self.now,
            "score before": self.score_before,
            "score now": self.score_now,
        }


def pairs(before: Sequence[Row], now: Sequence[Row]) -> list[Pair]:
    """Return the prompts that both tables of `val/generations` have, in the order of `now`.

    The responses to a prompt that has several are matched in their order.
    """
    earlier = dict(_numbered(before))
    return [
        Pair(
            prompt=row["prompt"],
            before=earlier[key]["response"],
            now=row["response"],
            score_before=earlier[key]["score"],
            score_now=row["score"],
        )
        for key, row in _numbered(now)
        if key in earlier
    ]


def is_sample(row: Row) -> bool:
    """Return whether a row has all columns that are compared; a file may be damaged or of another version."""
    texts = (row.get("prompt"), row.get("response"))
    score = row.get("score", "")
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return all(isinstance(text, str) for text in texts) and (score is None or is_number)


def _numbered(rows: Sequence[Row]) -> Iterator[tuple[tuple[object, int], Row]]:
    """Yield each row with its prompt and the number of the response to it."""
    seen: Counter[object] = Counter()
    for row in filter(is_sample, rows):
        yield (row["prompt"], seen[row["prompt"]]), row
        seen[row["prompt"]] += 1
