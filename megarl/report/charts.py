"""The charts of a report, as `charts.yaml` lists them. Figures are Plotly's JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megarl.report.read import Points, Run
from megarl.tracking.names import TIMING

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
        found = list[str]()
        for wanted in self.metrics:
            for name in run.names():
                is_wanted = name == wanted or (wanted.endswith("/") and name.startswith(wanted))
                if is_wanted and name not in self.left_out:
                    found.append(name)
        return found


CHARTS = [
    Chart(**fields) for fields in yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))
]


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


def thin(points: Points, most: int) -> Points:
    """Return at most so many points: each the mean of neighbouring points, at the last of their steps."""
    size = -(-len(points) // most) or 1
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
    is_alone = num_runs == 1
    for place, name in enumerate(chart.names(run, is_alone=is_alone)):
        points = run.points(name)
        title = name.removeprefix(TIMING)
        colour = COLOURS[place % len(COLOURS)]
        dash = "solid"
        if not is_alone:
            title = f"{run.name}: {title}"
            colour = COLOURS[number % len(COLOURS)]
            dash = DASHES[place % len(DASHES)]
        if chart.smooth and len(points) >= LEAST_SMOOTHED:
            yield _line(points, f"{title}, each step", colour, dash) | {"opacity": 0.35, "showlegend": False}
            points = running_mean(points)
            title = f"{title}, running mean"
        line = _line(points, title, colour, dash)
        if chart.stacked and is_alone:
            line |= {"stackgroup": f"{number}", "mode": "lines"}
        yield line


def _line(points: Points, title: str, colour: str, dash: str) -> Figure:
    steps, values = zip(*thin(points, MOST_POINTS), strict=True) if points else ((), ())
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 30 else "lines+markers",
        "name": title,
        "x": steps,
        "y": values,
        "line": {"color": colour, "dash": dash, "width": 2},
        "hovertemplate": "step %{x}: %{y:.4g}",
    }
