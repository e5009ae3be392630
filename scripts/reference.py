"""Write the pages that describe the code: `python scripts/reference.py [--check] [PAGE ...]`, by default all.

A page is docs/PAGE.md. With `--check` nothing is written, and the program fails if a page differs from the code.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from megarl.config.reference import ROOTS, parts
from megarl.tracking.metrics import GROUPS, TABLES, Metric

DOCS = Path(__file__).resolve().parents[1] / "docs"
SPREAD = ("mean", "max", "min")
WRITTEN_BY = "<!-- Written by `python scripts/reference.py {page}`; change the code instead. -->"


def metrics() -> Iterator[str]:
    """Yield the paragraphs of docs/metrics.md."""
    yield "# Metrics"
    yield WRITTEN_BY.format(page="metrics")
    yield fill(
        "Everything that a run records in `metrics.jsonl`, on the console, and in MLflow, TensorBoard and W&B "
        "(`trainer.logger`). A word in capitals differs from run to run: SOURCE is a data source, N the number of "
        "responses to a prompt, K a power of two up to N. Metrics of an update are means over its mini-batches. A "
        "metric without a condition is recorded in every step of a run of its kind. MLflow writes `@` as `_at_`. A "
        "name that a store does not accept keeps what is readable, and a digest follows.",
        width=120,
        break_on_hyphens=False,
    )
    for heading, group in GROUPS.items():
        yield f"## {heading}"
        usual, count = Counter(metric.when for metric in group).most_common(1)[0]
        if not usual or count <= len(group) / 2:
            usual = ""
        else:
            yield f"Recorded if {usual}, unless a row has another condition."
        rows = [(*row, "" if when == usual else when or "always") for *row, when in joined(group)]
        columns = 4 if any(row[-1] for row in rows) else 3
        yield table(("metric", "unit", "meaning", "recorded if")[:columns], [row[:columns] for row in rows])
    yield "## Tables"
    yield table(("table", "columns", "rows"), [(f"`{name}`", columns, meaning) for name, columns, meaning in TABLES])


def joined(group: Sequence[Metric]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of metrics; a mean, a maximum and a minimum of the same number share a row."""
    names = {metric.name for metric in group}
    for metric in group:
        base, _, end = metric.name.rpartition("/")
        if {f"{base}/{word}" for word in SPREAD} <= names and end in SPREAD:
            if end != "mean":
                continue
            name = f"`{base}/mean`, `/max`, `/min`"
            meaning = metric.meaning.replace("Mean", "Mean, largest and smallest", 1)
            yield name, metric.unit, meaning, metric.when
        else:
            yield f"`{metric.name}`", metric.unit, metric.meaning, metric.when


def configuration() -> Iterator[str]:
    """Yield the paragraphs of docs/configuration.md: those above the mark stay as they are in the file."""
    mark = WRITTEN_BY.format(page="configuration")
    yield (DOCS / "configuration.md").read_text(encoding="utf-8").partition(mark)[0].strip()
    yield mark
    found = parts()
    for root, (heading, command) in ROOTS.items():
        yield f"## {heading}: `{called(command)}`"
        for part in found[root]:
            yield f"### {part.title}"
            text = part.text
            if part.twin is not None:
                text = f"The keys are those of [{part.twin}](#{anchor(part.twin)}){'; these differ' * bool(part.keys)}."
            yield fill(f"{text} {part.condition}".strip(), width=120, break_on_hyphens=False, break_long_words=False)
            if part.keys:
                rows = [
                    (f"`{key.name}`", key.kind, key.default, f"{key.text} {key.condition}".strip()) for key in part.keys
                ]
                yield table(("key", "type", "default", "meaning"), rows)


def called(command: str) -> str:
    """Return a command as its user types it."""
    return f"megarl {command.replace('_', '-')}"


def anchor(title: str) -> str:
    """Return the name of a heading in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {"configuration": configuration, "metrics": metrics}
"""Page -> its paragraphs."""


def content(page: str) -> str:
    """Return the text of a page."""
    return "\n\n".join(PAGES[page]()) + "\n"


def main() -> None:
    """Write pages, or compare them with the code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=", ".join(PAGES))
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs from the code")
    options = parser.parse_args()
    if unknown := set(options.pages) - PAGES.keys():
        parser.error(f"no such page: {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    for page in options.pages or PAGES:
        path = DOCS / f"{page}.md"
        if not options.check:
            path.write_text(content(page), encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content(page):
            sys.exit(f"docs/{page}.md differs from the code: run `python scripts/reference.py {page}`")


if __name__ == "__main__":
    main()
