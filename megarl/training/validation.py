"""Validates the actor: scores per data source, for single responses and groups, and samples for people to read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isnan
from operator import itemgetter

import torch
from torch import Tensor

from megarl.platform import progress
from megarl.algorithms.groups import mean_over_prompts, statistics
from megarl.batch import PromptList, Scored
from megarl.distributed.exchange import to_first_rank
from megarl.distributed.sharded import Sharded, join_sharded
from megarl.rewards.collective import RewardError
from megarl.rewards.scoring import first_failures
from megarl.samples.store import SampleStore
from megarl.tracking.protocol import Tracker
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Scorer
from megarl.training.score_accumulator import SLOWEST, ScoreAccumulator

VOTE_BYTES = 6  # a float64 holds such an integer exactly
NO_RULE = -1  # the vote of a response if no rule extracts answers


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation of the actor on held-out prompts."""

    prompts: PromptSource
    sampler: Sampler
    scorer: Scorer
    tracker: Tracker
    num_shown: int  # responses that are logged
    store: SampleStore | None = None  # keeps all samples

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
        scores = ScoreAccumulator(self.scorer)
        with progress.within("testing"):
            with self.sampler.awake(Timers(), step=step) as metrics:
                sampled = [self.sampler.validate(prompts, step=step) for prompts in self.prompts.batches()]
            scored = join_sharded([scores.score(rollouts) for rollouts in sampled])
        self.tracker.log_table("val/generations", _shown(scored, self.num_shown), step=step)
        reported = {f"val/{name}": value for name, value in scores.metrics().items() if name != SLOWEST}
        reported["val/reward/masked_rate"] = 1.0 - float(scored.sum(scored.share.has_score())) / len(scored)
        if self.store:
            reported["val/archive/failures"] = float(not self.store.save_validation(scored, step=step))
        return metrics | reported | scores_by_source(scored)


def scores_by_source(scored: Sharded[Scored]) -> Metrics:
    """Return the metrics of a validation, over the samples that have a score. Every prompt has equally many samples.

    Collective.

    Raises:
        RewardError: no sample of a data source has a score.
    """
    prompts = PromptList.of(scored.index.prompts)
    num = len(scored) // len(prompts)
    has_score = scored.marked(scored.share.has_score())
    scores_and_votes = torch.stack([scored.share.scores.double(), _votes(scored.share)], dim=1)
    all_scores, all_votes = scored.gather(scores_and_votes).T
    all_scores = all_scores.to(torch.float32)
    samples: list[list[int]] = [[] for _ in range(len(prompts))]
    for sample in has_score.nonzero()[:, 0].tolist():
        samples[int(scored.index.groups[sample])].append(sample)
    by_source: dict[str, list[list[int]]] = defaultdict(list)
    for place, of_prompt in enumerate(samples):
        of_source = by_source[prompts.source(place)]
        if of_prompt:
            of_source.append(of_prompt)
    metrics = {}
    for source, of_source in by_source.items():
        if not of_source:
            raise RewardError(
                f"no validation response of data source {source!r} has a score; {'; '.join(first_failures(scored))}"
            )
        scores = [all_scores[of_prompt] for of_prompt in of_source]
        metrics[f"val/test_score/{source}"] = mean_over_prompts(scores)
        found = statistics(scores, _votes_of(of_source, all_votes), num=num)
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return metrics


def _votes(share: Scored) -> Tensor:
    """Return a number for each extracted answer, `[b]` float64, equal for equal answers.

    It is 0 for a response without one, and NO_RULE if no rule extracts one.
    """
    votes = map(_vote, share.answers or [None] * len(share))
    return torch.tensor([*votes], dtype=torch.float64)


def _vote(answer: str | None) -> int:
    """Return the number of an answer. Two answers have the same by chance once in 2 ** 48 pairs."""
    if not answer:
        return NO_RULE if answer is None else 0
    return 1 + int.from_bytes(blake2b(answer.encode(), digest_size=VOTE_BYTES).digest())


def _votes_of(prompts: Sequence[Sequence[int]], votes: Tensor) -> list[list[int]] | None:
    """Return the votes for the answers to each prompt, given its samples. None if no rule extracts answers."""
    found = [votes[samples].to(torch.int64) for samples in prompts]
    if all(bool((of_prompt == NO_RULE).all()) for of_prompt in found):
        return None
    return [of_prompt.clamp(min=0).tolist() for of_prompt in found]


def _shown(scored: Sharded[Scored], count: int) -> Sequence[Mapping[str, object]]:
    """Return rows of the first samples, for people, on the first rank. Collective."""
    share = scored.share
    chosen = (scored.mine < count).nonzero()[:, 0].tolist() if scored.shares.reports else []
    rows = list[tuple[int, dict[str, object]]]()
    for sample in chosen:
        prompt = share.prompt_of(sample)
        score = float(share.scores[sample])
        row: dict[str, object] = {"prompt_id": prompt.prompt_id, "prompt": prompt.text, "response": share.texts[sample]}
        row["score"] = None if isnan(score) else score
        rows.append((int(scored.mine[sample]), row))
    shown = [row for _, row in sorted(to_first_rank(rows), key=itemgetter(0))]
    if all(row["prompt_id"] is None for row in shown):
        for row in shown:
            del row["prompt_id"]
    return shown
