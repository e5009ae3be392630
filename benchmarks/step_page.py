"""The tables of docs/benchmarks/step.md, from what `python -m benchmarks step --json` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report

RATIOS = {
    "generation": "generation / vLLM",
    "infer": "infer / transformers",
    "update": "update / transformers",
}
PHASES = {"step": "step s", "gen": "generation s", "ref": "reference s", "update_actor": "update s"}


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of several runs, and how they were measured."""
    tables = [
        report.table(
            ("work", *PHASES.values(), "tokens/s", *RATIOS.values(), "everything else"), [_row(run) for run in runs]
        ),
        report.table(
            ("work", "reference, ms a token", "update, ms a token"), [(_work(run), *_of_token(run)) for run in runs]
        ),
        report.table(("work", "phase", "planned s", "measured s", "planned / measured"), _plans(runs)),
    ]
    trl = [row for run in runs if "trl" in run for row in _of_trl(run)]
    if trl:
        tables.append(report.table(("work", "phase", "TRL s", "megarl is faster with a token"), trl))
    lines = [f"- Command: `{run['command']}`" for run in runs]
    lines += [f"- Machine: {report.line(runs[0]['machine'])}", f"- Versions: {report.line(runs[0]['versions'])}"]
    return "\n\n".join([*tables, "\n".join(dict.fromkeys(lines))]) + "\n"


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _work(run),
        *(f"{run['seconds'].get(phase, {'median': 0.0})['median']:.2f}" for phase in PHASES),
        f"{run['tokens_per_second']:,.0f}",
        *(f"{run['ratios'][name]:.2f}" for name in RATIOS),
        f"{run['ratios']['other_share']:.1%}",
    )


def _work(run: Mapping[str, Any]) -> str:
    work = run["workload"]
    ranks = "1 rank" if work["ranks"] == 1 else f"{work['ranks']} ranks"
    return f"{work['model']}, {work['algorithm']}, {work['lengths']}, {ranks}"


def _of_token(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the milliseconds of a token of the reference and of the update."""
    tokens = run["tokens_per_second"] * run["seconds"]["step"]["median"]
    medians = (run["seconds"].get(phase, {"median": 0.0})["median"] for phase in ("ref", "update_actor"))
    return tuple(f"{1e3 * seconds / tokens:.3f}" for seconds in medians)


def _plans(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of what was planned."""
    return [
        (_work(run), phase, f"{of['planned']:.2f}", f"{of['measured']:.2f}", f"{of['ratio']:.2f}")
        for run in runs
        for phase, of in run["plan"].items()
    ]


def _of_trl(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = run["trl"]
    return [
        (_work(run), phase, f"{times['median']:.2f}", f"{found['times_faster'][phase]:.2f}x")
        for phase, times in found["seconds"].items()
    ]
