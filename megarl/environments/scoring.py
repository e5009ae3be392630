"""The scores of episodes, which their environments have given turn by turn, and what is measured of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.batch import Prompt, Rollouts, Scored, StopReason
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.sharded import Sharded
from megarl.environments.config import EnvironmentSection
from megarl.rewards.collective import NUM_WARNINGS, ScoringMetrics, report_failures

FAULTS = (StopReason.TIMEOUT, StopReason.FAILED)


class EpisodeScorer:
    """The reward of episodes: the sum of the rewards of their turns."""

    def __init__(self, section: EnvironmentSection, tokenizer: Tokenizer) -> None:
        self._section = section
        self._tokenizer = tokenizer

    def begin(self, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Do nothing: the environment has judged the turns."""

    def forget(self) -> None:
        """Do nothing: nothing is begun."""

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], ScoringMetrics]:
        """Score every episode. Return metrics of the episodes too. Collective.

        Raises:
            RewardError: an environment failed, and `on_failure` is `stop`.
        """
        share = samples.share
        assert share.turn_rewards is not None and share.faults is not None, "samples that are no episodes"
        is_masked = self._section.on_failure == "mask"
        scores = share.sums(share.turn_rewards).to(torch.float32)
        has_failed = torch.tensor([fault is not None for fault in share.faults], dtype=torch.bool)
        if is_masked:
            scores = scores.masked_fill(has_failed, torch.nan)
        self._report(samples, int(samples.sum(has_failed)))
        texts = [*map(self.text, share.pieces(share.responses), share.pieces(share.mask))]
        failures = share.faults if is_masked else None
        scored = share.extend(Scored, texts=texts, scores=scores, accuracies=scores, failures=failures)
        return samples.with_share(scored), metrics_of(samples)

    def text(self, response: Tensor, mask: Tensor) -> str:
        """Return an episode for people: each observation is in lines of its own, after `>>>`.

        `response` are its tokens, `[T]`; `mask` `[T]` bool is True on those of the policy.
        """
        spans, sizes = mask.unique_consecutive(return_counts=True)
        tokens = response.split(sizes.tolist())
        pieces = []
        for is_policy, piece in zip(spans.tolist(), tokens, strict=True):
            text = self._tokenizer.decode(piece.tolist())
            pieces.append(text if is_policy else f"\n>>> {text.strip()}\n")
        return "".join(pieces)

    def _report(self, samples: Sharded[Rollouts], num_failed: int) -> None:
        share = samples.share
        mine = samples.mine.tolist()
        messages = {
            place: f"the environment failed on sample {mine[place]} (data row {share.prompt_of(place).index}): {fault}"
            for place, fault in enumerate(share.faults or ())
            if fault is not None
        }
        report_failures(
            [*samples.first(NUM_WARNINGS, messages).values()],
            num_failed,
            of=len(samples),
            section="environment",
            on_failure=self._section.on_failure,
            default_score=self._section.default_score,
        )


def metrics_of(samples: Sharded[Rollouts]) -> dict[str, float]:
    """Return metrics of episodes: their turns, why they end, and how much of them the environment said. Collective."""
    share = samples.share
    assert share.num_turns is not None and share.stop_reasons is not None, "samples that are no episodes"
    ends = torch.tensor([[own == reason for reason in StopReason] for own in share.stop_reasons])
    numbers = [share.num_turns[:, None], share.sums(~share.mask)[:, None], ends.view(-1, len(StopReason))]
    totals = samples.sum(torch.cat([each.double() for each in numbers], dim=-1))
    turns, observed, *of_reasons = (totals / len(samples)).tolist()
    most, _ = samples.extremes(share.num_turns)
    return {
        "episode/turns/mean": turns,
        "episode/turns/max": float(most),
        "episode/observed_tokens/mean": observed,
        **{f"episode/stop/{reason}": rate for reason, rate in zip(StopReason, of_reasons, strict=True)},
    }
