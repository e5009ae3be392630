"""Reports of measurements: for programs, for a terminal and for a page."""

import os
import platform
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import PROGRAM
from megarl.platform.screen import Screen
from megarl.platform.versions import versions

COLUMNS = (
    "model",
    "layout",
    "megarl ms",
    "peer ms",
    "faster",
    "copy+repack ms",
    "over that",
    "exchange ms",
    "over all three",
    "received MB",
    "peer's",
    "peak MB",
    "peer's",
    "share",
)
WIDTH = 140  # of the table, even if the terminal is narrower or unknown


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a case from those of its ranks.

    Seconds are those of the slowest rank, the median over the repeats; bytes received and peaks are those of the rank
    that has most.
    """
    ranks = result["ranks"]
    seconds = {
        name: statistics.median(max(at_once) for at_once in zip(*(r["seconds"][name] for r in ranks), strict=True))
        for name in ranks[0]["seconds"]
    }
    received = {name: [rank["bytes_received"][name] for rank in ranks] for name in ranks[0]["bytes_received"]}
    peaks = {name: [rank["peak_extra_bytes"][name] for rank in ranks] for name in ranks[0]["peak_extra_bytes"]}
    counted = None not in [*peaks["megarl"], *peaks["mbridge"]]
    return result["case"] | {
        "num_ranks": len(ranks),
        "engine_bytes_max": max(rank["engine_bytes"] for rank in ranks),
        "seconds": seconds,
        "bytes_lower_bound_max": max(rank["bytes_lower_bound"] for rank in ranks),
        "bytes_received_max": {name: max(values) for name, values in received.items()},
        "bytes_received_mean": {name: statistics.mean(values) for name, values in received.items()},
        "peak_extra_bytes": {name: max(values) for name, values in peaks.items()} if counted else None,
        "times_faster": seconds["mbridge"] / seconds["megarl"],
        "times_copy_and_repack": seconds["megarl"] / (seconds["copy"] + seconds["repack"]),
        "times_all_three": seconds["megarl"] / (seconds["copy"] + seconds["repack"] + seconds["exchange"]),
        "peak_ratio": max(peaks["megarl"]) / max(peaks["mbridge"]) if counted else None,
        "mean_probability_difference": ranks[0]["mean_probability_difference"],  # equal on all,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Summarize the seconds of several repetitions."""
    return {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}


def machine(device: str) -> dict[str, Any]:
    """Return the machine and the time of a measurement."""
    processor = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    described = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor[1] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }
    if device == "cuda":
        import torch

        described["device"] = torch.cuda.get_device_name()
    return described


def command_line(name: str, argv: Sequence[str]) -> str:
    """Return the command of a measurement."""
    return f"{PROGRAM} {shlex.join([name, *argv])}"


def origin(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return what a measurement on the CPU is known by: its command, its machine, and versions of packages."""
    return {
        "command": command_line(name, argv),
        "machine": machine("cpu"),
        "versions": versions(),
    }


def show(found: dict[str, Any], console: Screen) -> None:
    """Print the cases as a table."""
    cases = Table(*COLUMNS)
    for case in found["cases"]:
        cases.add_row(*_row(case))
    describe(cases, found, console)


def describe(cases: Table, found: dict[str, Any], console: Screen) -> None:
    """Print a table, and below it how it was measured."""
    console.width = max(console.width, WIDTH)
    console.print(cases)
    for title in ("command", "machine", "versions"):
        console.print(f"{title}: {line(found[title])}", highlight=False, soft_wrap=True)


def markdown(found: dict[str, Any]) -> str:
    """Return the page of results."""
    cases = table(COLUMNS, map(_row, found["cases"]))
    template = Path(__file__).with_name("reshard.md").read_text(encoding="utf-8")
    return template.format(table=cases, **{title: line(found[title]) for title in ("command", "machine", "versions")})


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of a page."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    seconds = case["seconds"]
    received = case["bytes_received_max"]
    peaks = case["peak_extra_bytes"]
    counted = (f"{peaks[way] / 1e6:.1f}" for way in ("megarl", "mbridge")) if peaks else ("-", "-")
    return (
        case["model"],
        case["layout"],
        f"{seconds['megarl'] * 1e3:.0f}",
        f"{seconds['mbridge'] * 1e3:.0f}",
        f"{case['times_faster']:.1f}x",
        f"{seconds['copy'] * 1e3:.0f}+{seconds['repack'] * 1e3:.0f}",
        f"{case['times_copy_and_repack']:.2f}x",
        f"{seconds['exchange'] * 1e3:.0f}",
        f"{case['times_all_three']:.2f}x",
        f"{received['megarl'] / 1e6:.1f}",
        f"{received['mbridge'] / 1e6:.1f}",
        *counted,
        f"{case['peak_ratio']:.2f}" if peaks else "-",
    )


def line(value: str | dict[str, Any]) -> str:
    """Return a text, or pairs of names and values, in one line."""
    return value if isinstance(value, str) else ", ".join(f"{key} {item}" for key, item in value.items())
