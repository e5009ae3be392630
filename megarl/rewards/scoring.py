"""The reward of a run: every response is scored on some rank, by processes that it cannot harm, and known on all.

A response may be begun as soon as the engine has finished it, while others are still decoded. A response whose reward
failed or took too long is counted and named; `reward_model.on_failure` says what becomes of it.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.batch import Prompt, Rollouts, Scored
from megarl.distributed import watchdog
from megarl.distributed.exchange import together
from megarl.platform.secrets import beginning
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.pool import Pool, ScoringResult, WorkerLimits
from megarl.rewards.rules import Rules, known_data_source
from megarl.rewards.wire import pack

ROUND_S = 1.0
SHOWN_CHARACTERS = 120
NUM_WARNINGS = 3
MAX_METRICS = 32
logger = logging.getLogger(__name__)


class RewardError(ValueError):
    """A reward that fails on too many responses, or a row that no reward can read."""


@dataclass(frozen=True, eq=False)
class PendingResponse:
    """A response that is being scored here."""

    token_ids: list[int]
    text: str
    outcome: Future[ScoringResult]


class RuleScorer:
    """The reward, spread over all ranks."""

    def __init__(
        self, *, rules: Rules, pool: Pool, decode: Callable[[Sequence[int]], str], section: RulesSection
    ) -> None:
        self.rules, self.pool, self.decode, self.section = rules, pool, decode, section
        self._begun: dict[int, list[PendingResponse]] = defaultdict(list)  # by prompt index: of one data set at a time

    @classmethod
    def make(
        cls, section: RulesSection, custom: CustomRewardSection, decode: Callable[[Sequence[int]], str]
    ) -> "RuleScorer":
        """The reward that the configuration asks for. ValueError where the custom file does not give its function."""
        rules = Rules(path=custom.path, name=custom.name, weights=section.weights)
        rules.load()  # here only to find its faults before anything else starts
        limits = WorkerLimits(
            num_workers=section.num_workers,
            timeout_s=section.timeout_s,
            max_memory=int(section.max_memory_gb * 1e9),
        )
        return cls(rules=rules, pool=Pool(rules, limits), decode=decode, section=section)

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Start to score a response on this rank; `score` will find it. Never raises."""
        self._begun[prompt.index].append(self._submit(prompt, list(token_ids)))

    def score(self, rollouts: Rollouts) -> tuple[Scored, dict[str, float]]:
        """Score every sample; with metrics of the scoring.

        Raises:
            RewardError: on every rank alike, if `on_failure` is `stop` and a reward fails, or `score` and all rewards
                raise, naming the first; if a row holds what cannot be handed to a reward.
            ValueError: a data source has no rule.
        """
        if self.rules.reads_data_source():
            for prompt in rollouts.prompts:
                known_data_source(prompt.data_source)
        begun = {sample: found for sample in range(len(rollouts)) if (found := self._find(rollouts, sample))}
        judged = self._gather(begun)
        if rest := [sample for sample in range(len(rollouts)) if sample not in judged]:
            share = rest[dist.get_rank() :: dist.get_world_size()]
            judged |= self._gather(
                {sample: self._submit(rollouts.prompt_of(sample), rollouts.response_ids(sample)) for sample in share}
            )
        texts, outcomes = zip(*(judged[sample] for sample in range(len(rollouts))), strict=True)
        is_masked = self.section.on_failure == "mask"
        scores = [
            outcome.numbers.get("score", math.nan if is_masked else self.section.default_score) for outcome in outcomes
        ]
        accuracies = [outcome.numbers.get("acc", score) for outcome, score in zip(outcomes, scores, strict=True)]
        scored = rollouts.extend(
            Scored,
            texts=texts,
            scores=torch.tensor(scores),
            accuracies=torch.tensor(accuracies),
            answers=[outcome.pred for outcome in outcomes],
            failures=[outcome.detail if outcome.fault else None for outcome in outcomes],
        )
        self._report(scored, outcomes)
        return scored if is_masked else replace(scored, failures=None), metrics_of(outcomes)

    def _submit(self, prompt: Prompt, token_ids: list[int]) -> PendingResponse:
        text = self.decode(token_ids)
        try:
            arguments = pack(
                {
                    "data_source": prompt.data_source,
                    "solution_str": text,
                    "ground_truth": prompt.ground_truth,
                    "extra_info": prompt.extra_info,
                }
            )
        except TypeError as error:
            unreadable: Future[ScoringResult] = Future()
            unreadable.set_exception(RewardError(f"data row {prompt.index}: {error}"))
            return PendingResponse(token_ids, text, unreadable)
        return PendingResponse(token_ids, text, self.pool.submit(arguments))

    def _find(self, rollouts: Rollouts, sample: int) -> PendingResponse | None:
        index = rollouts.prompt_of(sample).index
        token_ids = rollouts.response_ids(sample) if index in self._begun else None
        for begun in self._begun.get(index, ()):
            if begun.token_ids == token_ids:
                self._begun[index].remove(begun)
                if not self._begun[index]:
                    del self._begun[index]
                return begun
        return None

    def _gather(self, begun: Mapping[int, PendingResponse]) -> dict[int, tuple[str, ScoringResult]]:
        """Text and outcome of what any rank has begun, by sample."""
        self._wait([response.outcome for response in begun.values()])

        def tell() -> dict[int, tuple[str, ScoringResult]]:
            outcomes = self.pool.wait([response.outcome for response in begun.values()])
            texts = [response.text for response in begun.values()]
            return dict(zip(begun, zip(texts, outcomes, strict=True), strict=True))

        return {sample: judged for part in together(tell) for sample, judged in part.items()}

    def _wait(self, futures: Sequence[Future[ScoringResult]]) -> None:
        """Return on all ranks when every rank has its outcomes. Each outcome is progress of all ranks.

        Ranks meet every second: a rank that is done would see no progress of the others while it waits in a collective.
        """
        before = None
        while pending := sum(together(lambda: self.pool.count_pending(futures, within_s=ROUND_S))):
            if pending != before:
                watchdog.note_progress()
            before = pending

    def _report(self, scored: Scored, outcomes: Sequence[ScoringResult]) -> None:
        messages, on_failure = first_failures(scored), self.section.on_failure
        num_failed = sum(outcome.fault is not None for outcome in outcomes)
        if num_failed and on_failure == "stop":
            raise RewardError(f"{'; '.join(messages)} (reward_model.on_failure=stop)")
        if on_failure == "score" and all(outcome.fault == "error" for outcome in outcomes):
            raise RewardError(f"the reward fails on all {len(scored)} responses; {messages[0]}")
        if dist.get_rank() == 0:
            score = f"its score is reward_model.default_score={self.section.default_score}"
            fate = score if on_failure == "score" else "nothing is learnt from it (reward_model.on_failure=mask)"
            for message in messages:
                logger.warning("%s; %s", message, fate)
            if num_failed > len(messages):
                logger.warning("... and so on %d more of %d", num_failed - len(messages), len(outcomes))


def metrics_of(outcomes: Sequence[ScoringResult]) -> dict[str, float]:
    """How scoring went, and the mean of each number that rewards gave beside the score, over those that have it."""
    reported = defaultdict[str, list[float]](list)
    for outcome in outcomes:
        for name, number in outcome.numbers.items():
            if name != "score" and (name in reported or len(reported) < MAX_METRICS):
                reported[name].append(number)
    return {
        "reward/timeout_rate": _share(outcome.fault == "timeout" for outcome in outcomes),
        "reward/error_rate": _share(outcome.fault == "error" for outcome in outcomes),
        "reward/slowest_s": max(outcome.seconds for outcome in outcomes),
    } | {f"reward/{name}/mean": sum(numbers) / len(numbers) for name, numbers in reported.items()}


def _share(answers: Iterable[bool]) -> float:
    counted = list(answers)
    return sum(counted) / len(counted)


def first_failures(scored: Scored) -> list[str]:
    """Describe the first few samples without a score."""
    failed = [sample for sample, is_judged in enumerate(scored.judged().tolist()) if not is_judged]
    return [_message(scored, sample) for sample in failed[:NUM_WARNINGS]]


def _message(scored: Scored, sample: int) -> str:
    assert scored.failures
    prompt, text = scored.prompt_of(sample), scored.texts[sample]
    shown = beginning(text, SHOWN_CHARACTERS)
    return (
        f"the reward failed on sample {sample} (data source {prompt.data_source!r}, data row {prompt.index}, "
        f"response {shown + ('...' if len(text) > len(shown) else '')!r}): {scored.failures[sample]}"
    )
