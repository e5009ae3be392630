"""The reward of a run: one rank of those that have a response scores it, in processes that it cannot harm.

Scoring of a response may start as soon as the engine has finished it, while other responses are still decoded. A
response whose reward failed or took too long is counted and reported; `reward_model.on_failure` decides what happens to
it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from megarl.batch import Prompt, Rollouts, Scored
from megarl.distributed.exchange import all_reduce, from_first_rank, on_each_rank, to_first_rank
from megarl.distributed.sharded import Sharded
from megarl.platform.device import on_cuda
from megarl.platform.log import show_printed
from megarl.platform.secrets import beginning
from megarl.rewards.built_in import known_data_source
from megarl.rewards.collective import (
    NUM_WARNINGS,
    Mean,
    RewardError,
    ScoringMetrics,
    finish,
    report_failures,
)
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_pool, make_rules
from megarl.rewards.rules import Rules
from megarl.rewards.signature import IDS, PROMPT
from megarl.sandbox.pool import Pool, ScoringResult, failed
from megarl.sandbox.wire import pack

SHOWN_CHARACTERS = 120
HELD_S = 1.0  # D436
"""Seconds of scoring that wait for the end of a generation on the CPU, because an engine shares its cores with rewards.

Each start of a process takes the engine about twice the time that the process computes."""
MAX_METRICS = 32
UNTOLD = ("", ScoringResult(seconds=0.0, detail="the rank that reports it knows why"))
"""Text and result of a sample that another rank has scored, on a rank that does not report it."""

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""


SampleKey = tuple[int, bytes, bytes]
"""The data row of a prompt, the tokens of the prompt, and those of a response, as bytes."""


@dataclass(frozen=True, eq=False)
class PendingResponse:
    """A response that this rank is scoring."""

    text: str
    result: Future[ScoringResult]


class RuleScorer:
    """The rules of a run."""

    def __init__(self, *, rules: Rules, pool: Pool, decode: Decode, section: RulesSection) -> None:
        self.rules = rules
        self.pool = pool
        self._decode = decode
        self._section = section
        self._begun = defaultdict[SampleKey, list[PendingResponse]](list)

    @classmethod
    def make(cls, section: RulesSection, custom: CustomRewardSection, decode: Decode) -> "RuleScorer":
        """Make the configured reward. Raises UserError if the custom file does not define its function."""
        show_printed(on_console=section.show_prints)
        pool = make_pool(section, custom, held_s=0.0 if on_cuda() else HELD_S)
        return cls(rules=make_rules(section, custom), pool=pool, decode=decode, section=section)

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Start to score a response on this rank; `score` will find it. Never raises."""
        self._begun[_key(prompt, token_ids)].append(self._submit(prompt, list(token_ids)))

    def forget(self) -> None:
        """Forget the responses that this rank has begun to score, since nothing will ask for them."""
        self._begun.clear()

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], ScoringMetrics]:
        """Score every sample; return metrics of the scoring too. Collective.

        Raises:
            RewardError: on every rank, if `on_failure` is `stop` and a reward fails, or if it is `score` and all
                rewards raise, naming the first failure; if a row has a value that cannot be passed to a reward; if a
                response has changed the reward.
            UserError: a data source has no rule.
        """
        share = samples.share
        if self.rules.reads_data_source():
            data_sources = [share.prompts[place].data_source for place in set(share.groups.tolist())]
            on_each_rank(lambda: [known_data_source(name) for name in data_sources])
        found = self._results(samples)
        results = [result for _, result in found]
        is_masked = self._section.on_failure == "mask"
        score_of_failure = math.nan if is_masked else self._section.default_score
        scores = [result.numbers.get("score", score_of_failure) for result in results]
        accuracies = [result.numbers.get("acc", score) for result, score in zip(results, scores, strict=True)]
        has_failed = [result.fault is not None for result in results]
        numbers = torch.tensor([scores, accuracies, has_failed], dtype=torch.float64)
        from_first_rank(numbers, group=samples.shares.group)
        scored = share.extend(
            Scored,
            texts=[text for text, _ in found],
            scores=numbers[0].to(torch.float32),
            accuracies=numbers[1].to(torch.float32),
            answers=[result.pred for result in results],
            failures=[result.detail if failed else None for result, failed in zip(results, numbers[2], strict=True)],
        )
        self._report(samples.with_share(scored), results)
        scored = scored if is_masked else replace(scored, failures=None)
        return samples.with_share(scored), metrics_of(samples, results)

    def _results(self, samples: Sharded[Rollouts]) -> list[tuple[str, ScoringResult]]:
        """Return text and result of each sample of the share: all on the rank that reports. Collective.

        The other ranks of the share know those that they have scored themselves.
        """
        shares = samples.shares
        mine = self._started(samples.share, shares.group)
        results = {sample: response.result for sample, response in mine.items()}
        found = finish(results, len(samples), lambda sample, result: (mine[sample].text, result), pool=self.pool)
        on_each_rank(lambda: self._require_unchanged([result for _, result in found.values()]))
        found |= to_first_rank([] if shares.reports else [*found.items()], group=shares.group)  # D443
        return [found.get(sample, UNTOLD) for sample in range(len(samples.share))]

    def _started(self, share: Rollouts, group: dist.ProcessGroup | None) -> dict[int, PendingResponse]:
        """Return, by sample, what this rank scores of a share that the ranks of `group` have. Collective.

        These are the responses that it has begun, and its part of those that no rank has begun.
        """
        rank = dist.get_rank(group)
        begun = {sample: self._find(share, sample) for sample in range(len(share))}
        scorers = torch.tensor([rank if found else -1 for found in begun.values()], dtype=torch.int64)
        all_reduce(scorers, dist.ReduceOp.MAX, group=group)
        late = (scorers < 0).nonzero()[:, 0]
        scorers[late] = torch.arange(len(late)) % dist.get_world_size(group)
        return {
            sample: begun[sample] or self._submit(share.prompt_of(sample), share.response_ids(sample).tolist())
            for sample in (scorers == rank).nonzero()[:, 0].tolist()
        }

    def _submit(self, prompt: Prompt, token_ids: list[int]) -> PendingResponse:
        """Start to score a response. Never raises: reading the result raises the error, on all ranks together."""
        text = ""
        try:
            text = self._decode(token_ids)
            return PendingResponse(text, self.pool.submit(self._packed(prompt, text, token_ids)))
        except Exception as error:  # another rank may already wait in a collective
            return PendingResponse(text, failed(error))

    def _packed(self, prompt: Prompt, text: str, token_ids: list[int]) -> object:
        """Return the arguments of the rules. Raises RewardError for a value that cannot be passed to them."""
        ids = {IDS: token_ids} if self.pool.takes_ids else {}
        try:
            return pack(
                {
                    PROMPT: prompt.text,
                    "data_source": prompt.data_source,
                    "solution_str": text,
                    "ground_truth": prompt.ground_truth,
                    "extra_info": prompt.extra_info,
                    **ids,
                }
            )
        except TypeError as error:
            raise RewardError(f"data row {prompt.index}: {error}") from error

    def _find(self, rollouts: Rollouts, sample: int) -> PendingResponse | None:
        """Take the response of a sample out of those that this rank has begun; None if it has not begun it."""
        key = _key(rollouts.prompt_of(sample), rollouts.response_ids(sample).numpy()) if self._begun else None
        if key is None or key not in self._begun:
            return None
        found = self._begun[key].pop(0)
        if not self._begun[key]:
            del self._begun[key]
        return found

    def _require_unchanged(self, results: Sequence[ScoringResult]) -> None:
        """Raise RewardError if a known wrong response has shown that a response changed the reward."""
        for result in results:
            if result.fault == "canary":
                raise RewardError(
                    f"reward_model.isolation=process: {result.detail}. Scores of the last "
                    f"{self._section.canary_every} calls (reward_model.canary_every) may be wrong: resume from an "
                    "earlier checkpoint with reward_model.isolation=response, or mend the reward"
                )

    def _report(self, scored: Sharded[Scored], results: Sequence[ScoringResult]) -> None:
        messages = first_failures(scored)
        on_failure = self._section.on_failure
        faults = [[result.fault is not None, result.fault == "error"] for result in results]
        num_failed, num_errors = map(int, scored.sum(torch.tensor(faults).view(-1, 2)))
        if on_failure == "score" and num_errors == len(scored):
            raise RewardError(f"the reward fails on all {len(scored)} responses; {messages[0]}")
        report_failures(
            messages,
            num_failed,
            of=len(scored),
            section="reward_model",
            on_failure=on_failure,
            default_score=self._section.default_score,
        )


def _key(prompt: Prompt, token_ids: ArrayLike) -> SampleKey:
    prompt_ids, response_ids = (np.asarray(ids, dtype=np.int32).tobytes() for ids in (prompt.token_ids, token_ids))
    return prompt.index, prompt_ids, response_ids


def metrics_of(samples: Sharded[Rollouts], results: Sequence[ScoringResult]) -> ScoringMetrics:
    """Return metrics of the scoring, and the mean of each further number over the responses that have it. Collective.

    `results` are those of this rank's share.
    """
    names = _reported_names(samples, results)
    rows = [
        [result.seconds, result.fault == "timeout", result.fault == "error"]
        + [result.numbers.get(name, math.nan) for name in names]
        for result in results
    ]
    numbers = torch.tensor(rows, dtype=torch.float64).view(-1, 3 + len(names))
    slowest, _ = samples.extremes(numbers[:, 0])
    is_given = ~numbers.isnan()
    found = samples.sum(torch.stack([numbers.where(is_given, 0.0), is_given.double()], dim=1)).T.tolist()
    _, timeouts, errors, *further = (Mean(total, int(count)) for total, count in found)
    return {
        "reward/timeout_rate": timeouts.value,
        "reward/error_rate": errors.value,
        "reward/slowest_s": float(slowest),
        **{f"reward/{name}/mean": mean for name, mean in zip(names, further, strict=True)},
    }


def _reported_names(samples: Sharded[Rollouts], results: Sequence[ScoringResult]) -> list[str]:
    """Return the names of the first further numbers that the reward reports. Collective."""
    new = dict[int, list[str]]()
    known = set[str]()
    for place, result in enumerate(results):
        if len(known) >= MAX_METRICS:
            break  # a name that comes later is among the first of no rank
        names = [name for name in result.numbers if name != "score" and name not in known]
        if names:
            new[place] = names
            known |= set(names)
    everywhere = samples.first(len(samples), new)
    return list(dict.fromkeys(chain.from_iterable(everywhere.values())))[:MAX_METRICS]


def first_failures(samples: Sharded[Scored]) -> list[str]:
    """Describe the first few samples without a score. Collective."""
    share = samples.share
    mine = samples.mine.tolist()
    failed = (~share.has_score()).nonzero()[:, 0].tolist()[:NUM_WARNINGS]
    messages = {place: _message(share, place, number=mine[place]) for place in failed}
    return [*samples.first(NUM_WARNINGS, messages).values()]


def _message(scored: Scored, sample: int, *, number: int) -> str:
    assert scored.failures
    judge = "reward" if scored.num_turns is None else "environment"
    prompt = scored.prompt_of(sample)
    text = scored.texts[sample]
    shown = beginning(text, SHOWN_CHARACTERS)
    return (
        f"the {judge} failed on sample {number} (data source {prompt.data_source!r}, data row {prompt.index}, "
        f"response {shown + ('...' if len(text) > len(shown) else '')!r}): {scored.failures[sample]}"
    )
