"""What a validation says: scores per data source, of answers alone and together, and samples for people to read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.algorithms.groups import statistics
from megarl.batch import Scored, join
from megarl.interfaces import PromptSource, Sampler, Scorer
from megarl.samples.archive import Archive
from megarl.samples.judge import SLOWEST, Judge
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
    archive: Archive | None = None  # None: the samples are not kept

    def run(self, *, step: int) -> dict[str, float]:
        """Draw and score answers to every prompt; logs the first of them, and keeps all where they are to be kept.

        Returns:
            Of each data source the mean score as `val/test_score/SOURCE`, and where a prompt has several answers
            `val/SOURCE/mean@N` and the others of `megarl.algorithms.groups.statistics`; and what the reward says of
            its work, as `val/reward/...`, but for its time: a validation that is repeated says the same. Where the
            samples are kept, `val/archive/failures` is 1 if the disk did not take them, and 0 otherwise.
        """
        with self.sampler.awake(Timers(), step=step) as metrics:
            drawn = [self.sampler.validate(prompts, step=step) for prompts in self.prompts.batches()]
        judge = Judge(self.scorer)
        scored = join([judge.score(rollouts) for rollouts in drawn])
        self.tracker.log_table("val/generations", _shown(scored, self.num_shown), step=step)
        told = {f"val/{name}": value for name, value in judge.metrics().items() if name != SLOWEST}
        if self.archive:
            told["val/archive/failures"] = float(not self.archive.keep_validation(scored, step=step))
        return metrics | told | scores_by_source(scored)


def scores_by_source(scored: Scored) -> dict[str, float]:
    """The metrics of a validation, from all its samples; each prompt has equally many."""
    num_prompts = len(scored.prompts)
    num = len(scored) // num_prompts
    places: dict[str, list[int]] = defaultdict(list)
    for place, prompt in enumerate(scored.prompts):
        places[prompt.data_source].append(place)
    metrics = {}
    for source, of_source in places.items():
        scores = scored.scores.view(num_prompts, num)[of_source]
        metrics[f"val/test_score/{source}"] = float(scores.double().mean())
        answers = _answers(scored, [place * num + number for place in of_source for number in range(num)])
        metrics |= {f"val/{source}/{name}": value for name, value in statistics(scores, answers).items()}
    return metrics


def _answers(scored: Scored, samples: Sequence[int]) -> list[str] | None:
    """The answers of some samples, '' where one has none; None where the reward told of no sample which it is."""
    told = [scored.answers[sample] if scored.answers else None for sample in samples]
    return [answer or "" for answer in told] if any(answer is not None for answer in told) else None


def _shown(scored: Scored, count: int) -> list[Mapping[str, Any]]:
    """Rows of the first samples, for people."""
    have_ids = any(prompt.prompt_id is not None for prompt in scored.prompts)
    return [
        ({"prompt_id": scored.prompt_of(sample).prompt_id} if have_ids else {})
        | {
            "prompt": scored.prompt_of(sample).text,
            "response": scored.texts[sample],
            "score": float(scored.scores[sample]),
        }
        for sample in range(min(count, len(scored)))
    ]
