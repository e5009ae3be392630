"""The reward of a run: one rank scores a response, in processes that it cannot harm, and all ranks get the result.

Scoring of a response may start as soon as the engine has finished it, while other responses are still decoded. A
response whose reward failed or took too long is counted and reported; `reward_model.on_failure` decides what happens to
it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from megarl.platform import progress
from megarl.batch import Prompt, Rollouts, Scored
from megarl.distributed.exchange import together
from megarl.platform.secrets import beginning
from megarl.rewards.collective import NUM_WARNINGS, ROUND_S, RewardError, gather, report_failures
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_pool, make_rules
from megarl.rewards.rules import Rules, known_data_source
from megarl.rewards.signature import IDS, PROMPT
from megarl.sandbox.pool import Pool, ScoringResult
from megarl.sandbox.wire import pack

SHOWN_CHARACTERS = 120
MAX_METRICS = 32


SampleKey = tuple[int, bytes, bytes]
"""The data row of a prompt, the tokens of the prompt, and those of a response, as bytes."""


@dataclass(frozen=True, eq=False)
class PendingResponse:
    """A response that this rank is scoring."""

    text: str
    result: Future[ScoringResult]


class RuleScorer:
    """The rules of a run, called on all ranks."""

    def __init__(
        self, *, rules: Rules, pool: Pool, decode: Callable[[Sequence[int]], str], section: RulesSection
    ) -> None:
        self.rules = rules
        self.pool = pool
        self._decode = decode
        self._section = section
        self._begun = defaultdict[SampleKey, list[PendingResponse]](list)

    @classmethod
    def make(
        cls, section: RulesSection, custom: CustomRewardSection, decode: Callable[[Sequence[int]], str]
    ) -> "RuleScorer":
        """Make the configured reward. Raises UserError if the custom file does not define its function."""
        return cls(rules=make_rules(section, custom), pool=make_pool(section, custom), decode=decode, section=section)

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Start to score a response on this rank; `score` will find it. Never raises."""
        self._begun[_key(prompt, token_ids)].append(self._submit(prompt, list(token_ids)))

    def forget(self) -> None:
        """Forget the responses that this rank has begun to score, since nothing will ask for them."""
        self._begun.clear()

    def score(self, rollouts: Rollouts) -> tuple[Scored, dict[str, float]]:
        """Score every sample; return metrics of the scoring too. Collective.

        Raises:
            RewardError: on every rank, if `on_failure` is `stop` and a reward fails, or if it is `score` and all
                rewards raise, naming the first failure; if a row has a value that cannot be passed to a reward; if a
                response has changed the reward.
            UserError: a data source has no rule.
        """
        if self.rules.reads_data_source():
            for prompt in rollouts.prompts:
                known_data_source(prompt.data_source)
        started = {sample: found for sample in range(len(rollouts)) if (found := self._find(rollouts, sample))}
        by_sample = self._gather(started)
        rest = [sample for sample in range(len(rollouts)) if sample not in by_sample]
        if rest:
            share = rest[dist.get_rank() :: dist.get_world_size()]
            by_sample |= self._gather(
                {
                    sample: self._submit(rollouts.prompt_of(sample), rollouts.response_ids(sample).tolist())
                    for sample in share
                }
            )
        self._require_unchanged([result for _, result in by_sample.values()])
        texts, results = zip(*(by_sample[sample] for sample in range(len(rollouts))), strict=True)
        is_masked = self._section.on_failure == "mask"
        scores = [
            result.numbers.get("score", math.nan if is_masked else self._section.default_score) for result in results
        ]
        accuracies = [result.numbers.get("acc", score) for result, score in zip(results, scores, strict=True)]
        scored = rollouts.extend(
            Scored,
            texts=texts,
            scores=torch.tensor(scores),
            accuracies=torch.tensor(accuracies),
            answers=[result.pred for result in results],
            failures=[result.detail if result.fault else None for result in results],
        )
        self._report(scored, results)
        return scored if is_masked else replace(scored, failures=None), metrics_of(results)

    def _submit(self, prompt: Prompt, token_ids: list[int]) -> PendingResponse:
        text = self._decode(token_ids)
        ids = {IDS: token_ids} if self.pool.takes_ids else {}
        try:
            arguments = pack(
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
            unreadable: Future[ScoringResult] = Future()
            unreadable.set_exception(RewardError(f"data row {prompt.index}: {error}"))
            return PendingResponse(text, unreadable)
        return PendingResponse(text, self.pool.submit(arguments))

    def _find(self, rollouts: Rollouts, sample: int) -> PendingResponse | None:
        """Take the response of a sample out of those that this rank has begun; None if it has not begun it."""
        key = _key(rollouts.prompt_of(sample), rollouts.response_ids(sample).numpy()) if self._begun else None
        if key is None or key not in self._begun:
            return None
        found = self._begun[key].pop(0)
        if not self._begun[key]:
            del self._begun[key]
        return found

    def _gather(self, started: Mapping[int, PendingResponse]) -> dict[int, tuple[str, ScoringResult]]:
        """Return text and result, by sample, of the responses that any rank has begun."""
        num = sum(together(lambda: len(started)))
        if num:
            progress.announce(num, "rewards")
        return gather(
            {sample: response.result for sample, response in started.items()},
            num,
            lambda sample, result: (started[sample].text, result),
            wait_for=lambda left: self.pool.count_pending(left, within_s=ROUND_S),
            arrived=progress.advance,
        )

    def _require_unchanged(self, results: Sequence[ScoringResult]) -> None:
        """Raise RewardError on all ranks if a known wrong response has shown that a response changed the reward."""
        for result in results:
            if result.fault == "canary":
                raise RewardError(
                    f"reward_model.isolation=process: {result.detail}. Scores of the last "
                    f"{self._section.canary_every} calls (reward_model.canary_every) may be wrong: resume from an "
                    "earlier checkpoint with reward_model.isolation=response, or mend the reward"
                )

    def _report(self, scored: Scored, results: Sequence[ScoringResult]) -> None:
        messages = first_failures(scored)
        on_failure = self._section.on_failure
        num_failed = sum(result.fault is not None for result in results)
        if on_failure == "score" and all(result.fault == "error" for result in results):
            raise RewardError(f"the reward fails on all {len(scored)} responses; {messages[0]}")
        report_failures(
            messages,
            num_failed,
            of=len(results),
            section="reward_model",
            on_failure=on_failure,
            default_score=self._section.default_score,
        )


def _key(prompt: Prompt, token_ids: ArrayLike) -> SampleKey:
    prompt_ids, response_ids = (np.asarray(ids, dtype=np.int32).tobytes() for ids in (prompt.token_ids, token_ids))
    return prompt.index, prompt_ids, response_ids


def metrics_of(results: Sequence[ScoringResult]) -> dict[str, float]:
    """Return metrics of the scoring, and the mean of each further number over the responses that have it."""
    reported = defaultdict[str, list[float]](list)
    for result in results:
        for name, number in result.numbers.items():
            if name != "score" and (name in reported or len(reported) < MAX_METRICS):
                reported[name].append(number)
    return {
        "reward/timeout_rate": _share(result.fault == "timeout" for result in results),
        "reward/error_rate": _share(result.fault == "error" for result in results),
        "reward/slowest_s": max(result.seconds for result in results),
    } | {f"reward/{name}/mean": sum(numbers) / len(numbers) for name, numbers in reported.items()}


def _share(conditions: Iterable[bool]) -> float:
    counted = list(conditions)
    return sum(counted) / len(counted)


def first_failures(scored: Scored) -> list[str]:
    """Describe the first few samples without a score."""
    failed = (~scored.has_score()).nonzero()[:, 0].tolist()
    return [_message(scored, sample) for sample in failed[:NUM_WARNINGS]]


def _message(scored: Scored, sample: int) -> str:
    assert scored.failures
    prompt = scored.prompt_of(sample)
    text = scored.texts[sample]
    shown = beginning(text, SHOWN_CHARACTERS)
    return (
        f"the reward failed on sample {sample} (data source {prompt.data_source!r}, data row {prompt.index}, "
        f"response {shown + ('...' if len(text) > len(shown) else '')!r}): {scored.failures[sample]}"
    )
