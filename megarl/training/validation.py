"""What a validation says: scores per data source, of answers alone and together, and samples for people to read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.algorithms.groups import mean_over_prompts, statistics
from megarl.batch import Scored, join
from megarl.rewards.scoring import RewardError, first_failures
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Tracker
from megarl.training.archive import Archive
from megarl.training.interfaces import PromptSource, Sampler, Scorer
from megarl.training.judge import SLOWEST, Judge


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
            samples are kept, `val/archive/failures` is 1 if the disk did not take them, and 0 otherwise. Samples whose
            reward failed are in none of the scores; `val/reward/masked_rate` is their share.

        Raises:
            RewardError: most samples, or all samples of a data source, have no score.
        """
        with self.sampler.awake(Timers(), step=step) as metrics:
            drawn = [self.sampler.validate(prompts, step=step) for prompts in self.prompts.batches()]
        judge = Judge(self.scorer)
        scored = join([judge.score(rollouts) for rollouts in drawn])
        self.tracker.log_table("val/generations", _shown(scored, self.num_shown), step=step)
        told = {f"val/{name}": value for name, value in judge.metrics().items() if name != SLOWEST}
        told["val/reward/masked_rate"] = 1.0 - float(scored.judged().double().mean())
        if self.archive:
            told["val/archive/failures"] = float(not self.archive.keep_validation(scored, step=step))
        return metrics | told | scores_by_source(scored)


def scores_by_source(scored: Scored) -> dict[str, float]:
    """The metrics of a validation, from its samples that have a score; each prompt was given equally many samples.

    Raises:
        RewardError: no sample of a data source has a score.
    """
    num = len(scored) // len(scored.prompts)
    judged = scored.select(scored.judged().nonzero()[:, 0])
    samples: list[list[int]] = [[] for _ in scored.prompts]
    for sample, place in enumerate(judged.groups.tolist()):
        samples[place].append(sample)
    by_source: dict[str, list[list[int]]] = defaultdict(list)
    for prompt, of_prompt in zip(scored.prompts, samples, strict=True):
        by_source[prompt.data_source] += [of_prompt] if of_prompt else []
    metrics = {}
    for source, of_source in by_source.items():
        if not of_source:
            raise RewardError(
                f"the reward failed on every validation response of data source {source!r}; "
                f"{'; '.join(first_failures(scored))}"
            )
        scores = [judged.scores[of_prompt] for of_prompt in of_source]
        metrics[f"val/test_score/{source}"] = mean_over_prompts(scores)
        found = statistics(scores, _answers(judged, of_source), num=num)
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return metrics


def _answers(judged: Scored, prompts: Sequence[Sequence[int]]) -> list[list[str]] | None:
    """The answers to each prompt, '' if a response has none; None if the reward did not tell the answer of any."""
    told = [[judged.answers[sample] if judged.answers else None for sample in samples] for samples in prompts]
    if all(answer is None for answers in told for answer in answers):
        return None
    return [[answer or "" for answer in answers] for answers in told]


def _shown(scored: Scored, count: int) -> list[Mapping[str, Any]]:
    """Rows of the first samples, for people."""
    have_ids = any(prompt.prompt_id is not None for prompt in scored.prompts)
    return [
        ({"prompt_id": scored.prompt_of(sample).prompt_id} if have_ids else {})
        | {
            "prompt": scored.prompt_of(sample).text,
            "response": scored.texts[sample],
            "score": None if scored.scores[sample].isnan() else float(scored.scores[sample]),
        }
        for sample in range(min(count, len(scored)))
    ]
