"""The summary of a run: one sentence on its score, and notes on curves that deserve a look. Pure functions."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from megarl.report.read import Points, Run
from megarl.report.texts import text_notes
from megarl.tracking.names import REWARD, VALIDATION

SAME = 0.01  # a change below this share of the largest score is none
ALIKE = 3  # steps in which no two responses differ in their score, for a remark
RECENT = 5  # values that a remark on the end of a curve looks at
COLLAPSED = 0.1
SPIKE = 10.0
LONG = 0.2


@dataclass(frozen=True, kw_only=True)
class Score:
    """The curve that decides the summary."""

    title: str
    points: Points  # at least one
    lower_is_better: bool = False
    is_held_out: bool = True  # not of the samples that are learnt from, whose scores go up and down

    @property
    def first(self) -> float:
        """The first value."""
        return self.points[0][1]

    @property
    def last(self) -> float:
        """The last value."""
        return self.points[-1][1]

    @property
    def best(self) -> tuple[int, float]:
        """The step and the value of the best, the earliest among equals."""
        pick = min if self.lower_is_better else max
        return pick(self.points, key=lambda point: point[1])

    @property
    def is_better(self) -> bool:
        """Whether the last value is better than the first."""
        return (self.last < self.first) if self.lower_is_better else (self.last > self.first)

    @property
    def is_same(self) -> bool:
        """Whether the last value hardly differs from the first."""
        return abs(self.last - self.first) <= SAME * max(abs(value) for _, value in self.points)


def score_of(run: Run) -> Score | None:
    """Return the curve that decides the summary: held-out before training, scores before losses. None without any."""
    validation = defaultdict[int, list[float]](list)
    for name in run.names():
        if name.startswith(VALIDATION):
            for step, value in run.points(name):
                validation[step].append(value)
    if validation:
        return Score(title="validation score", points=[(step, fmean(validation[step])) for step in sorted(validation)])
    for name, title, lower in (
        ("val/accuracy", "held-out accuracy", False),
        ("val/loss", "held-out loss", True),
        (REWARD, "training reward", False),
        ("reward_model/accuracy", "training accuracy", False),
        ("sft/loss", "training loss", True),
    ):
        points = run.points(name)
        if points:
            return Score(title=title, points=points, lower_is_better=lower, is_held_out=name.startswith("val/"))
    return None


def summary(run: Run) -> str:
    """Return a sentence: the score at the first and at the last step, and the best."""
    score = score_of(run)
    if score is None:
        return f"{run.name} has recorded no score yet."
    first_step, first = score.points[0]
    last_step, last = score.points[-1]
    if len(score.points) == 1:
        return f"The {score.title} is {first:.4g} at step {first_step}; there is no second value yet."
    best_step, best = score.best
    if score.is_same:
        change = f"hardly changed: {first:.4g} at step {first_step}, {last:.4g} at step {last_step}"
    else:
        direction = "rose" if last > first else "fell"
        judged = "better" if score.is_better else "worse"
        if score.is_better and any(text_notes(run)):
            judged = "better by the reward alone: see the remarks on its texts"
        change = f"{direction} from {first:.4g} to {last:.4g} at step {last_step} ({judged})"
    return f"The {score.title} {change}; the best is {best:.4g} at step {best_step}."


def notes(run: Run) -> Iterator[str]:
    """Yield what a person should look at, each with its reason."""
    yield from text_notes(run)
    score = score_of(run)
    if score and score.is_held_out and not score.is_same and score.best[0] < score.points[-1][0]:
        lost = abs(score.best[1] - score.last)
        if lost > abs(score.best[1] - score.first) / 5:
            yield f"The {score.title} is worse than at step {score.best[0]}: prefer a checkpoint of that step."
    least = [value for _, value in run.points("critic/score/min")][-ALIKE:]
    most = [value for _, value in run.points("critic/score/max")][-ALIKE:]
    if len(least) == ALIKE and {*least} == {*most} == {least[0]}:
        yield (
            f"Every response of the latest {ALIKE} steps has the score {least[0]:.4g}, so there is nothing to learn "
            "from: train on demonstrations first, take easier prompts, or let the reward grade more finely."
        )
    entropy = [value for _, value in run.points("actor/entropy")]
    if len(entropy) > RECENT and fmean(entropy[-RECENT:]) < COLLAPSED * entropy[0]:
        yield "The entropy has fallen below a tenth of its first value: the policy hardly explores any more."
    long = _recent(run, "response_length/clip_ratio", above=LONG)
    if long:
        yield f"{long:.0%} of the latest responses reach the length limit: raise data.max_response_length."
    norms = [value for _, value in run.points("actor/grad_norm") or run.points("grad_norm")]
    if len(norms) > RECENT and max(norms) > SPIKE * median(norms):
        yield f"The gradient norm has peaks ({max(norms):.3g}, median {median(norms):.3g}): clip it or lower the rate."
    mismatch = run.points("training/rollout_mismatch")
    limit = run.points("training/rollout_mismatch_limit")
    if mismatch and limit and mismatch[-1][1] > limit[-1][1] / 2:
        yield "Engine and trainer disagree by more than half of what stops the run."
    failed = _recent(run, "reward/masked_rate", above=0.0) or _recent(run, "reward/error_rate", above=0.0)
    if failed:
        yield f"The reward failed on {failed:.1%} of the latest responses."


def faults(run: Run) -> Iterator[str]:
    """Yield the faults that the run survived, counted."""
    for name in run.names():
        total = sum(value for _, value in run.points(name))
        if name.endswith("skipped_updates") and total:
            model = name.rpartition("/")[0] or "model"
            yield f"{total:g} updates of the {model} were skipped: loss or gradient was not finite"
    for skip in run.skips:
        yield (
            f"step {skip.get('step')}: mini-batch {skip.get('minibatch')} of the {skip.get('model')}: "
            f"loss {skip.get('loss')}, gradient norm {skip.get('grad_norm')}"
        )
    for name, words in (
        ("reward/error_rate", "had rewards that failed"),
        ("reward/timeout_rate", "had rewards that took too long"),
        ("training/rollout_mismatch_left_out", "left samples out because engine and trainer disagreed"),
        ("archive/failures", "could not write their samples"),
    ):
        steps = [step for step, value in run.points(name) if value > 0]
        if steps:
            yield f"{len(steps)} steps {words}, the last at step {steps[-1]}"
    for name, words in (("checkpoint/failed_saves", "saves failed"), ("checkpoint/mirror_failures", "uploads failed")):
        points = run.points(name)
        if points:
            yield f"{max(value for _, value in points):g} {words}"
    for name in run.hangs:
        yield f"a rank made no progress: {name} has the stacks of all ranks"


def _recent(run: Run, name: str, *, above: float) -> float | None:
    """Return the mean of the latest values of a metric if it is above a number, else None."""
    values = [value for _, value in run.points(name)][-RECENT:]
    mean = fmean(values) if values else above
    return mean if mean > above else None
