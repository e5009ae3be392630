"""Validates the actor: scores per data source, for single responses and groups, and samples for people to read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.platform import progress
from megarl.algorithms.groups import mean_over_prompts, statistics
from megarl.batch import Scored
from megarl.distributed.sharded import Sharded, join_sharded
from megarl.rewards.collective import RewardError
from megarl.rewards.scoring import first_failures
from megarl.samples.store import SampleStore
from megarl.tracking.protocol import Tracker
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Scorer
from megarl.training.score_accumulator import SLOWEST, ScoreAccumulator


class Validation:
    """The validation of the actor on held-out prompts."""

    def __init__(
        self,
        *,
        prompts: PromptSource,
        sampler: Sampler,
        scorer: Scorer,
        tracker: Tracker,
        num_shown: int,
        store: SampleStore | None = None,
    ) -> None:
        """Prepare a validation that logs `num_shown` responses, and keeps all samples if there is a `store`."""
        self.tracker = tracker
        self._prompts = prompts
        self._sampler = sampler
        self._scorer = scorer
        self._num_shown = num_shown
        self._store = store

    def run(self, *, step: int) -> Metrics:
        """Draw and score responses to every prompt. Log the first responses, and keep all of them if configured.

        Returns:
            For each data source the mean score, `val/test_score/SOURCE`. If a prompt has several responses, also
            `val/SOURCE/mean@N` and the other metrics of `megarl.algorithms.groups.statistics`. The reward's metrics
            as `val/reward/...`, except its time, so that a repeated validation gives the same metrics. If samples are
            kept, `val/archive/failures` is 1 if the disk refused them, else 0. Samples whose reward failed are in none
            of the scores; `val/reward/masked_rate` is their share.

        Raises:
            RewardError: most samples, or all samples of a data source, have no score.
        """
        scores = ScoreAccumulator(self._scorer)
        with progress.within("testing"):
            with self._sampler.awake(Timers(), step=step) as metrics:
                sampled = [self._sampler.validate(prompts, step=step) for prompts in self._prompts.batches()]
            scored = join_sharded([scores.score(rollouts) for rollouts in sampled])
        self.tracker.log_table("val/generations", _shown(scored, self._num_shown), step=step)
        reported = {f"val/{name}": value for name, value in scores.metrics().items() if name != SLOWEST}
        reported["val/reward/masked_rate"] = 1.0 - float(scored.sum(scored.share.has_score())) / len(scored)
        if self._store:
            reported["val/archive/failures"] = float(not self._store.keep_validation(scored, step=step))
        return metrics | reported | scores_by_source(scored)


def scores_by_source(scored: Sharded[Scored]) -> Metrics:
    """Return the metrics of a validation, over the samples that have a score. Every prompt has equally many samples.

    Collective.

    Raises:
        RewardError: no sample of a data source has a score.
    """
    prompts = scored.index.prompts
    num = len(scored) // len(prompts)
    has_score = scored.marked(scored.share.has_score())
    of_samples = scored.gather(scored.share.scores).to(torch.float32)
    answers = scored.first(len(scored), dict(enumerate(scored.share.answers or ())))
    samples: list[list[int]] = [[] for _ in prompts]
    for sample in has_score.nonzero()[:, 0].tolist():
        samples[int(scored.index.groups[sample])].append(sample)
    by_source: dict[str, list[list[int]]] = defaultdict(list)
    for prompt, of_prompt in zip(prompts, samples, strict=True):
        by_source[prompt.data_source] += [of_prompt] if of_prompt else []
    metrics = {}
    for source, of_source in by_source.items():
        if not of_source:
            raise RewardError(
                f"the reward failed on every validation response of data source {source!r}; "
                f"{'; '.join(first_failures(scored))}"
            )
        scores = [of_samples[of_prompt] for of_prompt in of_source]
        metrics[f"val/test_score/{source}"] = mean_over_prompts(scores)
        found = statistics(scores, _answers(answers, of_source), num=num)
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return metrics


def _answers(of_samples: Mapping[int, str | None], prompts: Sequence[Sequence[int]]) -> list[list[str]] | None:
    """Return the extracted answers for each prompt, '' for a response without one. None if no response has one."""
    found = [[of_samples.get(sample) for sample in samples] for samples in prompts]
    if all(answer is None for answers in found for answer in answers):
        return None
    return [[answer or "" for answer in answers] for answers in found]


def _shown(scored: Sharded[Scored], count: int) -> list[Mapping[str, Any]]:
    """Return rows of the first samples, for people. Collective."""
    share = scored.share
    have_ids = any(prompt.prompt_id is not None for prompt in share.prompts)
    rows: dict[int, Mapping[str, Any]] = {
        sample: ({"prompt_id": share.prompt_of(sample).prompt_id} if have_ids else {})
        | {
            "prompt": share.prompt_of(sample).text,
            "response": share.texts[sample],
            "score": None if share.scores[sample].isnan() else float(share.scores[sample]),
        }
        for sample in range(min(count, len(share)))
    }
    return [*scored.first(count, rows).values()]
