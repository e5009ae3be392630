"""A picture of the curves of a run: training reward on the left, validation scores on the right."""

from pathlib import Path
from typing import Any

from megarl.platform.errors import UserError
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.names import REWARD, validation_of

SMOOTHING = 0.8  # weight of the past in the running mean
_INK, _GREY = "#1f2933", "#9aa5b1"
_COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a")


def plot_curves(metrics_jsonl: str | Path, png: str | Path) -> None:
    """Draw `metrics.jsonl` into a PNG. Raise UserError if it has neither reward nor validation scores."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_jsonl(metrics_jsonl)
    rewards = [(row["step"], row[REWARD]) for row in rows if REWARD in row]
    validations: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for source, value in validation_of(row).items():
            validations.setdefault(source, []).append((row["step"], value))
    if not rewards and not validations:
        raise UserError(f"{metrics_jsonl} has neither {REWARD} nor a validation score to draw")

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_reward(left, rewards)
    for number, (source, points) in enumerate(validations.items()):
        style = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 4, "linewidth": 2}
        right.plot(*zip(*points, strict=True), label=source, **style)
    if validations:
        right.legend(frameon=False, fontsize=8)
    for axes, title in ((left, "training reward"), (right, "validation score")):
        _dress(axes, title)
    figure.savefig(str(png))


def _draw_reward(axes: Any, points: list[tuple[int, float]]) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    smooth = [values[0]]
    for value in values[1:]:
        smooth.append(SMOOTHING * smooth[-1] + (1 - SMOOTHING) * value)
    axes.plot(steps, values, color=_COLOURS[0], alpha=0.3, linewidth=1)
    axes.plot(steps, smooth, color=_COLOURS[0], linewidth=2)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=10)
    axes.set_xlabel("step", color=_INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)
