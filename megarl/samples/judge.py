"""What a reward says of its work in parts, as if it had been given all at once."""

from collections import defaultdict

from megarl.batch import Rollouts, Scored
from megarl.estimate import Metrics
from megarl.interfaces import Scorer

SLOWEST = "reward/slowest_s"
EXTREMES = {"max": max, "min": min, "slowest_s": max}  # how names end among the metrics of scoring


class Judge:
    """A reward, and what it has said of itself over all that it was given."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self._said = scorer, list[tuple[int, Metrics]]()

    def score(self, rollouts: Rollouts) -> Scored:
        """Score every sample."""
        scored, metrics = self._scorer.score(rollouts)
        self._said.append((len(rollouts), metrics))
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
