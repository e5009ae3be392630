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

from megarl.config.reference import ROOTS, Part, parts
from megarl.tracking.metrics import GROUPS, TABLES, Metric

DOCS = Path(__file__).resolve().parents[1] / "docs"
SPREAD = ("mean", "max", "min")
KINDS = {"true or false": "bool", "integer": "int", "number": "float", "text": "str", "mapping": "dict"}
"""The words of a type -> the shorter ones of the page."""
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
        usual = most_common([metric.when for metric in group])
        if usual:
            yield f"Condition of all without another one: {usual}."
        yield "\n".join(lines(group, usual))
    yield "## Tables"
    yield table(("table", "columns", "rows"), [(f"`{name}`", columns, meaning) for name, columns, meaning in TABLES])


def lines(group: Sequence[Metric], usual: str) -> Iterator[str]:
    """Yield the items of metrics: mean, maximum and minimum of a number share one, and so do those of validation."""
    names = {metric.name for metric in group}
    validated: dict[str, list[str]] = {}
    for metric in group:
        condition = "" if metric.when == usual else f" *Condition: {metric.when or 'none'}.*"
        base, _, end = metric.name.rpartition("/")
        unit = f" ({metric.unit})".replace(" (-)", "")
        if metric.meaning.startswith(f"As `{metric.name.removeprefix('val/')}`"):
            validated.setdefault(condition, []).append(f"`{metric.name}`")
        elif end in SPREAD and {f"{base}/{word}" for word in SPREAD} <= names:
            if end == "mean":
                meaning = metric.meaning.replace("Mean", "Mean, largest and smallest", 1)
                yield f"- **`{base}/mean`**, `/max`, `/min`{unit}: {meaning}.{condition}"
        else:
            yield f"- **`{metric.name}`**{unit}: {metric.meaning}.{condition}"
    for condition, found in validated.items():
        yield f"- As in training, for validation: {', '.join(found)}.{condition}"


def configuration() -> Iterator[str]:
    """Yield the paragraphs of docs/configuration.md: those above the mark stay as they are in the file."""
    mark = WRITTEN_BY.format(page="configuration")
    yield (DOCS / "configuration.md").read_text(encoding="utf-8").partition(mark)[0].strip()
    yield mark
    found = parts()
    known = dict[str, list[Part]]()
    for root, (heading, command) in ROOTS.items():
        yield f"## {heading}: `{called(command)}`"
        for part in found[root]:
            yield f"### {part.title}"
            text = part.text
            if part.twin is not None:
                text = f"The keys are those of [{part.twin}](#{anchor(part.twin)}){'; these differ' * bool(part.keys)}."
            yield fill(f"{text} {part.condition}".strip(), width=120, break_on_hyphens=False, break_long_words=False)
            earlier = known.setdefault(part.title.split()[-1], [])
            if part.keys:
                yield "\n".join(items(part, earlier))
            earlier.append(part)


def items(part: Part, earlier: Sequence[Part]) -> Iterator[str]:
    """Yield the items of a section, without those of earlier sections with the same name."""
    same: dict[str, list[str]] = {}
    own = []
    for key in part.keys:
        title = next((other.title for other in earlier if key in other.keys), "")
        if title:
            same.setdefault(title, []).append(f"`{key.name}`")
        else:
            own.append(key)
    for title, names in same.items():
        yield f"- As in [{title}](#{anchor(title)}): {', '.join(names)}."
    unread = [key for key in own if part.twin is not None and key.condition.startswith("*Not read")]
    for condition in dict.fromkeys(key.condition for key in unread):
        names = [f"`{key.name}`" for key in unread if key.condition == condition]
        yield f"- {condition.strip('*').removesuffix('.')}: {', '.join(names)}."
    own = [key for key in own if key not in unread]
    usual = most_common([key.condition for key in own])
    if usual:
        yield f"- Keys without another condition: {usual}"
    for key in own:
        condition = "" if key.condition == usual else key.condition.replace("Read only", "Only") or "*Always.*"
        kind = re.sub("|".join(KINDS), short_kind, key.kind)
        default, *further = ["empty"] if key.default == "``" else key.default.splitlines()
        yield f"- **`{key.name}`** ({kind}; {default}{' ...`' * bool(further)}): {key.text} {condition}".rstrip()


def most_common(conditions: Sequence[str]) -> str:
    """Return the condition of more than half of a list; empty if there is none."""
    [(usual, count)] = Counter(conditions).most_common(1) or [("", 0)]
    return usual if count > len(conditions) / 2 else ""


def short_kind(found: re.Match[str]) -> str:
    """Return the short name of a type."""
    return KINDS[found[0]]


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
    unknown = set(options.pages) - PAGES.keys()
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    for page in options.pages or PAGES:
        path = DOCS / f"{page}.md"
        if not options.check:
            path.write_text(content(page), encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content(page):
            sys.exit(f"docs/{page}.md differs from the code: run `python scripts/reference.py {page}`")


if __name__ == "__main__":
    main()
