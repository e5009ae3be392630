"""What a validation says: mean scores per data source, and some answers for people to read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.batch import Scored

Row = Mapping[str, Any]


def summarize(parts: Sequence[Scored], *, num_shown: int) -> tuple[dict[str, float], list[Row]]:
    """Mean score of each data source as `val/test_score/SOURCE`, and the first `num_shown` samples as table rows."""
    scores: dict[str, list[float]] = defaultdict(list)
    rows: list[Row] = []
    for part in parts:
        for sample, (text, score) in enumerate(zip(part.texts, part.scores.tolist(), strict=True)):
            prompt = part.prompt_of(sample)
            scores[prompt.data_source].append(score)
            if len(rows) < num_shown:
                rows.append({"prompt": prompt.text, "response": text, "score": score})
    return {f"val/test_score/{source}": sum(found) / len(found) for source, found in scores.items()}, rows
