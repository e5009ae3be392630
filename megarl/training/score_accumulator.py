"""Scores samples part by part, and reports metrics as if all had been scored at once."""

from collections import defaultdict
from collections.abc import Sequence

from megarl.batch import Rollouts, Scored
from megarl.distributed.sharded import Sharded
from megarl.rewards.collective import NUM_WARNINGS, Mean, RewardError, ScoringMetrics
from megarl.rewards.scoring import first_failures
from megarl.training.interfaces import Metrics, Scorer

SLOWEST = "reward/slowest_s"
EXTREMES = {"max": max, "min": min, "slowest_s": max}  # by the last part of a metric's name


class ScoreAccumulator:
    """A reward, with its metrics over all samples so far."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._reported = list[tuple[int, ScoringMetrics]]()
        self._num_scored = 0
        self._failures = list[str]()

    def score(self, rollouts: Sharded[Rollouts], *, least: int = 0) -> Sharded[Scored]:
        """Score every sample. Collective.

        Raises:
            RewardError: more than half of all samples so far have no score, and they are at least `least`.
        """
        scored, metrics = self._scorer.score(rollouts)
        self._reported.append((len(rollouts), metrics))
        self._num_scored += int(scored.sum(scored.share.has_score()))
        self._failures += first_failures(scored)
        num_samples = sum(count for count, _ in self._reported)
        if num_samples >= least:
            require_scores(self._num_scored, of=num_samples, failures=self._failures)
        return scored

    def metrics(self) -> Metrics:
        """Return the means over the samples, the largest of maxima and the smallest of minima."""
        means: dict[str, list[Mean]] = defaultdict(list)
        extremes: dict[str, list[float]] = defaultdict(list)
        for num_samples, metrics in self._reported:
            for name, value in metrics.items():
                if isinstance(value, Mean):
                    means[name].append(value)
                elif name.rpartition("/")[2] in EXTREMES:
                    extremes[name].append(value)
                else:
                    means[name].append(Mean(num_samples * value, num_samples))
        found: dict[str, float] = {}
        for name, parts in means.items():
            found[name] = Mean(sum(part.total for part in parts), sum(part.count for part in parts)).value
        for name, values in extremes.items():
            found[name] = EXTREMES[name.rpartition("/")[2]](values)
        return found


def require_scores(num_scored: int, *, of: int, failures: Sequence[str]) -> None:
    """Raise a RewardError with the first `failures` if fewer than half of the samples have a score."""
    if 2 * num_scored < of:
        raise RewardError(
            f"{of - num_scored} of {of} responses have no score, more than half, so the others would teach something "
            f"else: {'; '.join(failures[:NUM_WARNINGS])}. Mend what failed, or raise its timeout_s; with "
            "on_failure=score such responses get default_score (keys of reward_model, or of environment)"
        )
