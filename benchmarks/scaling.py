"""`python -m benchmarks scaling`: tokens per second over growing ranks, batches and responses, as table and picture.

Each point is a run of `python -m benchmarks step` without other libraries; all but one of its sizes are those of the
first point. On a CPU all ranks share the cores, so more ranks are worth only what they save.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.options import scaling_parser
from benchmarks.step import summarize, train
from benchmarks.workload import Workload
from megarl.commands.cli.command import print_error
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen

AXES = {"ranks": "ranks", "prompts": "prompts of a step", "response_tokens": "tokens of a response"}
COLUMNS = ("model", "ranks", "prompts", "tokens of a response", "step s", "tokens/s", "times the first")
INK = "#1f2933"
GREY = "#e4e7eb"
LINE = "#0b6e99"


@dataclass(frozen=True)
class Point:
    """The sizes of a run."""

    ranks: int
    prompts: int
    response_tokens: int


def main(argv: Sequence[str]) -> int:
    """Measure, write the picture, and print the results."""
    options, overrides = scaling_parser().parse_known_args(argv)
    try:
        found = {
            **report.origin("scaling", argv),
            "model": options.model,
            "points": [asdict(point) | _measure(point, options, overrides) for point in points(options)],
        }
    except UserError as error:
        print_error(error)
        return 1
    if options.picture:
        draw(found["points"], options.picture)
    if options.json:
        print(json.dumps(found))
    elif options.markdown:
        lines = [f"- Command: `{found['command']}`"]
        lines += [f"- {title.capitalize()}: {report.line(found[title])}" for title in ("machine", "versions")]
        print(report.table(COLUMNS, _rows(found)), *lines, sep="\n")
    else:
        table = Table(*COLUMNS)
        for row in _rows(found):
            table.add_row(*row)
        report.describe(table, found, Screen())
    return 0


def points(options: argparse.Namespace) -> list[Point]:
    """Return the points: along each axis the other sizes are the first of theirs."""
    first = Point(options.ranks[0], options.prompts[0], options.response_tokens[0])
    found = [first]
    for axis in AXES:
        found += [Point(**asdict(first) | {axis: size}) for size in getattr(options, axis)[1:]]
    return found


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens per second along each axis, logarithmic; grey lines grow in proportion from the first point."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    first = found[0]
    for axes, (axis, title) in zip(figure.subplots(1, len(AXES), sharey=True), AXES.items(), strict=True):
        others = [other for other in AXES if other != axis]
        line = sorted(
            (point[axis], point["tokens_per_second"])
            for point in found
            if all(point[other] == first[other] for other in others)
        )
        sizes, speeds = zip(*line, strict=True)
        axes.plot(sizes, [speeds[0] * size / sizes[0] for size in sizes], color=GREY, linewidth=2)
        axes.plot(sizes, speeds, color=LINE, linewidth=2, marker="o")
        axes.set(xscale="log", yscale="log", xticks=sizes, xticklabels=[str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(f"tokens/s over {title}", loc="left", fontsize=10, fontweight="bold", color=INK)
        axes.grid(color=GREY, linewidth=0.8)
    figure.savefig(path, metadata={"Date": None})


def _measure(point: Point, options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, float]:
    """Run the steps of a point."""
    workload = Workload(
        model=options.model,
        lengths="equal",
        algorithm="grpo",
        num_prompts=point.prompts,
        num_responses=options.responses,
        response_tokens=point.response_tokens,
    )
    print(f"{point}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        written = workload.write(Path(name))
        settings = argparse.Namespace(repeats=options.repeats, dtype=options.dtype, ranks=point.ranks)
        found = summarize(train(Path(name) / "run", settings, [*written, *overrides]), workload)
    return {"step_seconds": found["seconds"]["step"]["median"], "tokens_per_second": found["tokens_per_second"]}


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    first = found["points"][0]["tokens_per_second"]
    for point in found["points"]:
        sizes = (str(point[axis]) for axis in AXES)
        speed = point["tokens_per_second"]
        yield (found["model"], *sizes, f"{point['step_seconds']:.2f}", f"{speed:,.0f}", f"{speed / first:.2f}x")
