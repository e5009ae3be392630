"""What a validation says: mean scores per data source, and some answers for people to read."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.interfaces import PromptSource, Sampler, Scorer
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Prompts that the actor is judged by."""

    prompts: PromptSource
    sampler: Sampler
    scorer: Scorer
    tracker: Tracker
    num_shown: int  # answers logged each time

    def run(self, *, step: int) -> dict[str, float]:
        """Mean score of each data source as `val/test_score/SOURCE`; logs the scores and the first answers."""
        scores: dict[str, list[float]] = defaultdict(list)
        rows: list[Mapping[str, Any]] = []
        with self.sampler.awake(Timers(), step=step) as metrics:
            for prompts in self.prompts.batches():
                scored, _ = self.scorer.score(self.sampler.validate(prompts, step=step))
                for sample, (text, score) in enumerate(zip(scored.texts, scored.scores.tolist(), strict=True)):
                    prompt = scored.prompt_of(sample)
                    scores[prompt.data_source].append(score)
                    rows.append({"prompt": prompt.text, "response": text, "score": score})
        self.tracker.log_table("val/generations", rows[: self.num_shown], step=step)
        return metrics | {f"val/test_score/{source}": sum(found) / len(found) for source, found in scores.items()}
