"""The scores of episodes, which their environments have given turn by turn, and what is measured of them."""

from collections.abc import Sequence

import torch

from megarl.batch import Prompt, Rollouts, Scored, StopReason
from megarl.data.tokenizer import Tokenizer
from megarl.environments.config import EnvironmentSection
from megarl.rewards.collective import NUM_WARNINGS, report_failures

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

    def score(self, rollouts: Rollouts) -> tuple[Scored, dict[str, float]]:
        """Score every episode. Return metrics of the episodes too.

        Raises:
            RewardError: an environment failed, and `on_failure` is `stop`.
        """
        assert rollouts.turn_rewards is not None and rollouts.faults is not None, "samples that are no episodes"
        is_masked = self._section.on_failure == "mask"
        scores = rollouts.sums(rollouts.turn_rewards).to(torch.float32)
        if is_masked:
            scores = scores.masked_fill(torch.tensor([fault is not None for fault in rollouts.faults]), torch.nan)
        self._report([(sample, fault) for sample, fault in enumerate(rollouts.faults) if fault is not None], rollouts)
        texts = [self.text(rollouts, sample) for sample in range(len(rollouts))]
        failures = rollouts.faults if is_masked else None
        scored = rollouts.extend(Scored, texts=texts, scores=scores, accuracies=scores, failures=failures)
        return scored, metrics_of(rollouts)

    def text(self, rollouts: Rollouts, sample: int) -> str:
        """Return an episode for people: each observation is in lines of its own, after `>>>`."""
        places = rollouts.token_places(torch.tensor([sample]))
        spans, sizes = rollouts.mask[places].unique_consecutive(return_counts=True)
        pieces = []
        for is_policy, piece in zip(spans.tolist(), rollouts.responses[places].split(sizes.tolist()), strict=True):
            text = self._tokenizer.decode(piece.tolist())
            pieces.append(text if is_policy else f"\n>>> {text.strip()}\n")
        return "".join(pieces)

    def _report(self, faults: Sequence[tuple[int, str]], rollouts: Rollouts) -> None:
        messages = [
            f"the environment failed on sample {sample} (data row {rollouts.prompt_of(sample).index}): {fault}"
            for sample, fault in faults[:NUM_WARNINGS]
        ]
        report_failures(
            messages,
            len(faults),
            of=len(rollouts),
            section="environment",
            on_failure=self._section.on_failure,
            default_score=self._section.default_score,
        )


def metrics_of(rollouts: Rollouts) -> dict[str, float]:
    """Return metrics of episodes: their turns, why they end, and how much of them the environment said."""
    assert rollouts.num_turns is not None and rollouts.stop_reasons, "samples that are no episodes"
    turns = rollouts.num_turns.double()
    reasons = list(rollouts.stop_reasons)
    return {
        "episode/turns/mean": float(turns.mean()),
        "episode/turns/max": float(turns.max()),
        "episode/observed_tokens/mean": float(rollouts.sums(~rollouts.mask).mean()),
        **{f"episode/stop/{reason}": reasons.count(reason) / len(reasons) for reason in StopReason},
    }
