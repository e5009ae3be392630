"""What a reward says of its work in parts, as if it had been given all at once; and whether it works at all."""

from collections import defaultdict
from collections.abc import Sequence

from megarl.batch import Rollouts, Scored
from megarl.rewards.scoring import NUM_WARNINGS, RewardError, first_failures
from megarl.training.interfaces import Metrics, Scorer

SLOWEST = "reward/slowest_s"
EXTREMES = {"max": max, "min": min, "slowest_s": max}  # how names end among the metrics of scoring


class Judge:
    """A reward, and what it has said of itself over all that it was given."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self._said = scorer, list[tuple[int, Metrics]]()
        self._num_judged, self._failures = 0, list[str]()

    def score(self, rollouts: Rollouts) -> Scored:
        """Score every sample.

        Raises:
            RewardError: more than half of all samples so far have no score.
        """
        scored, metrics = self._scorer.score(rollouts)
        self._said.append((len(rollouts), metrics))
        self._num_judged += int(scored.judged().sum())
        self._failures += first_failures(scored)
        require_scores(self._num_judged, of=sum(count for count, _ in self._said), failures=self._failures)
        return scored

    def metrics(self) -> Metrics:
        """Means over the samples; of maxima the largest, of minima the smallest."""
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for num_samples, metrics in self._said:
            for name, value in metrics.items():
                found[name].append((num_samples, value))
        return {
            name: EXTREMES[name.rpartition("/")[2]](value for _, value in parts)
            if name.rpartition("/")[2] in EXTREMES
            else sum(weight * value for weight, value in parts) / sum(weight for weight, _ in parts)
            for name, parts in found.items()
        }


def require_scores(num_judged: int, *, of: int, failures: Sequence[str]) -> None:
    """Raise a RewardError with the first `failures` if fewer than half of the samples have a score."""
    if 2 * num_judged < of:
        raise RewardError(
            f"the reward failed on {of - num_judged} of {of} responses, more than half, so that the rest would teach "
            f"something else: {'; '.join(failures[:NUM_WARNINGS])}. Mend the reward or raise reward_model.timeout_s; "
            "with reward_model.on_failure=score such responses get reward_model.default_score"
        )
