"""The charts of a report: which metrics belong together, and what each should look like. Figures are Plotly's JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megarl.report.read import Points, Run
from megarl.tracking.names import REWARD, STEP_SECONDS, TIMING, VALIDATION, WITHIN_GEN

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#9f6b53", "#787774", "#d44c47", "#c29343", "#3a5a98")
Figure = dict[str, Any]
"""A part of a figure, as Plotly has it in JSON."""
DASHES = ("solid", "dot", "dash", "dashdot")
MOST_POINTS = 1000  # of a line; a longer curve is drawn by means of neighbouring steps
LEAST_SMOOTHED = 10  # points that a running mean needs
MOST_TICKS = 10  # steps that each have a tick; otherwise Plotly chooses the ticks
SMOOTHING = 0.8  # weight of the past in the running mean


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Metrics that are drawn in one frame."""

    title: str
    expect: str  # what a healthy curve looks like
    metrics: Sequence[str]  # names, or prefixes that end in /
    unit: str = ""
    stacked: bool = False
    total: str = ""  # of the stacked metrics: drawn instead of these if there are several runs
    smooth: bool = False  # draw a running mean over the values
    left_out: Sequence[str] = ()

    def names(self, run: Run, *, is_alone: bool) -> list[str]:
        """Return the metrics of the chart that a run has; `is_alone`: there is no other run."""
        if self.total and not is_alone:
            return [self.total] if run.points(self.total) else []
        return [
            name
            for wanted in self.metrics
            for name in run.names()
            if (name == wanted or (wanted.endswith("/") and name.startswith(wanted))) and name not in self.left_out
        ]


CHARTS = (
    Chart(
        title="Validation score",
        expect="Rises and levels off. A fall after a peak: it learns its prompts by heart, or exploits the reward.",
        metrics=VALIDATION,
        unit="reward",
    ),
    Chart(
        title="Training reward",
        expect="Rises, with noise from step to step. Flat from the start: too hard, or a reward that is always alike.",
        metrics=(REWARD,),
        unit="reward",
        smooth=True,
    ),
    Chart(
        title="Loss",
        expect="Falls, quickly at first. A held-out loss that rises while the other falls means overfitting.",
        metrics=("sft/loss", "reward_model/loss", "val/loss"),
        unit="nats",
    ),
    Chart(
        title="Accuracy of preferences",
        expect="Rises from 0.5, which is chance. The held-out accuracy follows below it.",
        metrics=("reward_model/accuracy", "val/accuracy"),
    ),
    Chart(
        title="KL to the reference",
        expect="Grows slowly from zero. A steep rise: the policy leaves the reference; raise the weight of the KL.",
        metrics=("actor/reward_kl_penalty", "actor/kl_loss"),
        unit="nats per token",
    ),
    Chart(
        title="KL of an update",
        expect="Stays near zero: the policy changes little in a step. A steep rise: lower the learning rate.",
        metrics=("actor/ppo_kl",),
        unit="nats per token",
    ),
    Chart(
        title="Entropy",
        expect="Falls slowly. Near zero the policy explores no more; a rise without end is a policy that falls apart.",
        metrics=("actor/entropy",),
        unit="nats per token",
    ),
    Chart(
        title="Response length",
        expect="Moves slowly. Watch a drift to the limit, or to empty responses: the reward may favour it.",
        metrics=("response_length/mean", "response_length/max", "response_length/min"),
        unit="tokens",
    ),
    Chart(
        title="Responses at the length limit",
        expect="Low. Above 0.2, data.max_response_length cuts off much of what the policy wants to say.",
        metrics=("response_length/clip_ratio",),
        unit="share",
    ),
    Chart(
        title="Clip fractions",
        expect="Small: a few percent, often zero. Large: steps leave the trusted range; lower the learning rate.",
        metrics=("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"),
        unit="share",
    ),
    Chart(
        title="Gradient norms",
        expect="Level or falling, before clipping. Rare peaks are harmless; growth over many steps is not.",
        metrics=("actor/grad_norm", "critic/grad_norm", "grad_norm"),
    ),
    Chart(
        title="Mismatch of engine and trainer",
        expect="Far below the limit and level. It may not grow: the samples would come from another policy.",
        metrics=("training/rollout_mismatch", "training/rollout_mismatch_limit"),
    ),
    Chart(
        title="Difference of probabilities, engine and trainer",
        expect="Means of rounding size: 1e-6 in float32, about 1e-3 to 1e-2 in bfloat16.",
        metrics=("training/rollout_probs_diff_mean",),
        unit="probability",
    ),
    Chart(
        title="Variance that the critic explains",
        expect="Rises from 0 towards 1. Below zero the critic does harm: give it a warm-up or a higher rate.",
        metrics=("critic/vf_explained_var",),
        unit="share of the variance",
    ),
    Chart(
        title="Time by phase",
        expect="Even from step to step. Steps with a validation or a save take longer.",
        metrics=(TIMING,),
        unit="s",
        stacked=True,
        total=STEP_SECONDS,
        left_out=(STEP_SECONDS, *(f"{TIMING}{name}" for name in WITHIN_GEN)),
    ),
    Chart(title="Throughput", expect="Level.", metrics=("perf/throughput",), unit="tokens/s per rank"),
    Chart(
        title="Memory of the first rank",
        expect="Level after the first steps: the host's is the peak so far, and its steady growth is a leak.",
        metrics=("perf/max_host_memory_gb", "perf/max_memory_allocated_gb"),
        unit="GB",
    ),
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield title, expectation and Plotly figure of each chart that a run has metrics for."""
    for chart in CHARTS:
        traces = [trace for number, run in enumerate(runs) for trace in _traces(chart, run, number, len(runs))]
        if traces:
            steps = [step for trace in traces for step in trace["x"]]
            ticks = {"dtick": 1} if steps and max(steps) - min(steps) < MOST_TICKS else {}
            layout = {
                "xaxis": {"showgrid": False} | ticks,
                "yaxis": {
                    "title": {"text": chart.unit, "standoff": 10},
                    "automargin": True,
                    "exponentformat": "e",
                    "rangemode": "tozero" if chart.stacked else "normal",
                },
            }
            title = "Time of a step" if chart.total and len(runs) > 1 else chart.title
            yield {"title": title, "expect": chart.expect, "data": traces, "layout": layout}


def thin(points: Points) -> Points:
    """Return at most `MOST_POINTS` points: each the mean of neighbouring points, at the last of their steps."""
    size = -(-len(points) // MOST_POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], fmean(value for _, value in part)) for part in parts]


def running_mean(points: Points) -> Points:
    """Return the points with the exponential running mean of their values."""
    means: Points = []
    for step, value in points:
        means.append((step, SMOOTHING * means[-1][1] + (1 - SMOOTHING) * value if means else value))
    return means


def _traces(chart: Chart, run: Run, number: int, num_runs: int) -> Iterator[Figure]:
    """Yield the lines of one run: a colour for each metric, or for each run if there are several."""
    for place, name in enumerate(chart.names(run, is_alone=num_runs == 1)):
        points = run.points(name)
        title = name.removeprefix(TIMING) if num_runs == 1 else f"{run.name}: {name.removeprefix(TIMING)}"
        colour = COLOURS[(place if num_runs == 1 else number) % len(COLOURS)]
        dash = "solid" if num_runs == 1 else DASHES[place % len(DASHES)]
        if chart.smooth and len(points) >= LEAST_SMOOTHED:
            yield _line(points, f"{title}, each step", colour, dash) | {"opacity": 0.35, "showlegend": False}
            points = running_mean(points)
            title = f"{title}, running mean"
        line = _line(points, title, colour, dash)
        yield line | ({"stackgroup": f"{number}", "mode": "lines"} if chart.stacked and num_runs == 1 else {})


def _line(points: Points, title: str, colour: str, dash: str) -> Figure:
    steps, values = zip(*thin(points), strict=True) if points else ((), ())
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 30 else "lines+markers",
        "name": title,
        "x": steps,
        "y": values,
        "line": {"color": colour, "dash": dash, "width": 2},
        "hovertemplate": "step %{x}: %{y:.4g}",
    }
