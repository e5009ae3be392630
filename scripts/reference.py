"""Write the pages that describe the code: `python scripts/reference.py [--check] [PAGE ...]`, by default all.

A page is docs/PAGE.md. With `--check` nothing is written, and the program fails if a page differs from the code.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TypeVar

from megarl.config.reference import Key, condition_of, keys_in, text_of, walk
from megarl.config.root import COMMANDS, Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts.metrics import GROUPS, TABLES, Metric  # noqa: E402

T = TypeVar("T")
DOCS = ROOT / "docs"
AND = ", and "
SPREAD = ("mean", "max", "min")
HEADINGS = {
    "train": "Training from rewards",
    "sft": "Supervised fine-tuning",
    "train-reward": "Training a reward model",
    "verify": "Verifying the weight sync",
}
"""Command -> the heading of its part of the page."""
KINDS = {"true or false": "bool", "integer": "int", "number": "float", "text": "str", "mapping": "dict"}
"""The words of a type -> the shorter ones of the page."""
WRITTEN_BY = "<!-- Written by `python scripts/reference.py {page}`; change the code instead. -->"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of the page of keys."""

    title: str
    text: str
    condition: str  # when the section is read; empty: always
    twin: str | None  # the title of an earlier part with the same keys: `keys` are those that differ
    keys: tuple[Key, ...]


def metrics() -> Iterator[str]:
    """Yield the paragraphs of docs/metrics.md."""
    yield "# Metrics"
    yield WRITTEN_BY.format(page="metrics")
    yield fill(
        "A run records these in `metrics.jsonl`, on the console, and in the trackers of `trainer.logger`. SOURCE is a "
        "data source, N the number of responses to a prompt, K a power of two up to N. Metrics of an update are means "
        "over its mini-batches. A metric without a condition is recorded in every step. MLflow writes `@` as `_at_`, "
        "and samples the first rank's host for its tab of system metrics, unless MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING "
        "is false.",
        width=120,
        break_on_hyphens=False,
    )
    earlier: dict[tuple[str, str, str], str] = {}
    for heading, group in GROUPS.items():
        yield f"## {heading}"
        for condition, found in by_condition([(metric.when, metric) for metric in group]):
            if condition:
                yield f"*Condition: {condition}.*"
            yield "\n".join(lines(found, earlier))
    yield "## Tables"
    yield table(("table", "columns", "rows"), [(f"`{name}`", columns, meaning) for name, columns, meaning in TABLES])


def lines(group: Sequence[tuple[str, Metric]], earlier: dict[tuple[str, str, str], str]) -> Iterator[str]:
    """Yield the items of metrics: mean, maximum and minimum of a number share one, and so do those described before."""
    names = {metric.name for _, metric in group}
    known: dict[tuple[str, str], list[str]] = {}
    for further, metric in group:
        condition = f" *Condition: {further}.*" * bool(further)
        base, _, end = metric.name.rpartition("/")
        unit = f" ({metric.unit})".replace(" (-)", "").replace("nats per token", "nats/token")
        described = earlier.setdefault((end, metric.unit, metric.meaning), base)
        if metric.meaning.startswith(f"As `{metric.name.removeprefix('val/')}`"):
            known.setdefault(("As in training, for validation", condition), []).append(f"`{metric.name}`")
        elif described != base:
            known.setdefault((f"As for `{described}`", condition), []).append(f"`{metric.name}`")
        elif end in SPREAD and {f"{base}/{word}" for word in SPREAD} <= names:
            if end == "mean":
                meaning = metric.meaning.removeprefix("Mean ")
                yield f"- **`{base}/mean`**, `/max`, `/min`{unit}: {meaning[0].upper()}{meaning[1:]}.{condition}"
        else:
            yield f"- **`{metric.name}`**{unit}: {metric.meaning}.{condition}"
    for (like, condition), found in known.items():
        yield f"- {like}: {', '.join(found)}.{condition}"


def configuration() -> Iterator[str]:
    """Yield the paragraphs of docs/configuration.md: those above the mark stay as they are in the file."""
    mark = WRITTEN_BY.format(page="configuration")
    yield (DOCS / "configuration.md").read_text(encoding="utf-8").partition(mark)[0].strip()
    yield mark
    earlier: list[Part] = []
    for command, found in parts().items():
        yield f"## {HEADINGS[command]}: `megarl {command}`"
        whole = {part.title: like for part in found if (like := twin_of(part, earlier))}
        if whole:
            links = ", ".join(f"`{title.split()[-1]}` ({linked(like)})" for title, like in whole.items())
            yield fill(f"Sections that repeat others: {links}.", 120, break_on_hyphens=False, break_long_words=False)
        for part in found:
            if part.title not in whole:
                yield from section(part, earlier)
                earlier.append(part)


def parts() -> dict[str, list[Part]]:
    """Return the parts of the page by command; a section that several places share is written out at the first."""
    first: dict[type, tuple[str, str, dict[str, Key]]] = {}
    found: dict[str, list[Part]] = {command: [] for command in COMMANDS.values()}
    for root, command in COMMANDS.items():
        for path, cls in walk(root):
            title = path if root is Config else f"{command.replace('-', '_')}: {path or 'the root'}"
            keys = {key.name: key for key in keys_in(cls, path, root, within=True)}
            twin, twin_path, known = first.setdefault(cls, (title, path, keys))
            differ = [key for name, key in keys.items() if not is_same(key, known[name], f"{twin_path}.{name}")]
            if keys:
                own = twin == title
                part = Part(
                    title=title,
                    text=text_of(cls),
                    condition=condition_of(path, root),
                    twin=None if own else twin,
                    keys=tuple(keys.values() if own else differ),
                )
                found[command].append(part)
    return found


def is_same(key: Key, known: Key, path: str) -> bool:
    """Return whether a key is explained as the `known` key at `path`, which it may follow."""
    same_default = key.default in (known.default, f"follows `{path}`")
    return same_default and key.text == known.text and key.condition in ("", known.condition)


def twin_of(part: Part, earlier: Sequence[Part]) -> str:
    """Return the title of an earlier section whose keys a section has unchanged; empty if there is none."""
    if part.twin is None or part.condition:
        return ""
    if not part.keys:
        return part.twin
    return next((one.title for one in earlier if (one.twin, one.keys) == (part.twin, part.keys)), "")


def section(part: Part, earlier: Sequence[Part]) -> Iterator[str]:
    """Yield the paragraphs of a section."""
    yield f"### {part.title}"
    text = re.sub(r"^`[^`]+`[^:]*: ", "", part.text)
    text = text[:1].upper() + text[1:]
    if part.twin is not None:
        text = f"As {linked(part.twin)}{', except:' if part.keys else '.'}"
    outer = [other.condition for other in earlier if part.title.startswith(f"{other.title}.")]
    condition = "" if part.condition in outer else part.condition
    words = f"{text} {condition}" if part.twin is None else f"{condition} {text}"
    yield fill(words.strip(), width=120, break_on_hyphens=False, break_long_words=False)
    of_twin = {key.name: key.text for other in earlier if other.title == part.twin for key in other.keys}
    same: dict[str, list[str]] = {}
    own = []
    for key in part.keys:
        title = next((other.title for other in earlier if key in other.keys), "")
        if part.twin is not None and key.condition.startswith("*Not read"):
            same.setdefault(key.condition.strip("*."), []).append(f"`{key.name}`")
        elif title and part.twin is None:
            same.setdefault(f"As in {linked(title)}", []).append(f"`{key.name}`")
        else:
            own.append((key.condition.strip("*.").removeprefix("Read only if "), key))
    items = [f"- {like}: {', '.join(names)}." for like, names in same.items()]
    for shared, found in by_condition(own):
        if shared:
            if items:
                yield "\n".join(items)
            yield f"*Only if {shared}:*"
            items = []
        items += [item(key, is_known=of_twin.get(key.name) == key.text) for _, key in found]
    if items:
        yield "\n".join(items)


def item(key: Key, *, is_known: bool) -> str:
    """Return the item of a key, without the meaning if that is known from a section before."""
    kind = re.sub(r" >=? 0\b(?!\.)(, )?|" + "|".join(KINDS), short_kind, key.kind)
    default, *further = ["empty"] if key.default == "``" else key.default.splitlines()
    if default == "`null`":
        kind = kind.removesuffix(" or null")
    kind = "" if kind == implied(default) else f"{kind}; "
    meaning = "" if is_known else f": {key.text}"
    return f"- **`{key.name}`** ({kind}{default}{' ...`' * bool(further)}){meaning}"


def implied(default: str) -> str:
    """Return the type that a default shows; empty if it shows none."""
    value = default.strip("`")
    if default == value or value == "null":
        return ""
    if value in ("true", "false"):
        return "bool"
    return "int" if re.fullmatch(r"-?\d+", value) else "float" if re.fullmatch(r"-?[\d.e-]+", value) else "str"


def by_condition(found: Sequence[tuple[str, T]]) -> Iterator[tuple[str, list[tuple[str, T]]]]:
    """Yield shared conditions, each with what it is shared by and their further conditions; first all without one.

    A condition is shared if two have it. What has the conditions of several groups is in that with most.
    """
    clauses = [frozenset(condition.split(AND)) for condition, _ in found if condition]
    shared = [one for one in dict.fromkeys(condition for condition, _ in found if condition) if is_shared(one, clauses)]
    groups: dict[str, list[tuple[str, T]]] = {"": [], **{one: [] for one in shared}}
    for condition, item in found:
        own = condition.split(AND) if condition else []
        fitting = [one for one in shared if {*one.split(AND)} <= {*own}]
        heading = max(fitting, key=lambda one: len(one.split(AND)), default="")
        groups[heading].append((AND.join(one for one in own if one not in heading.split(AND)), item))
    yield from ((heading, group) for heading, group in groups.items() if group)


def is_shared(condition: str, clauses: Sequence[frozenset[str]]) -> bool:
    """Return whether several have a condition."""
    return sum({*condition.split(AND)} <= one for one in clauses) > 1


def short_kind(found: re.Match[str]) -> str:
    """Return the short name of a type, and nothing for a bound at 0."""
    return KINDS.get(found[0], " " * bool(found[1]))


def linked(title: str) -> str:
    """Return a link to a section."""
    return f"[{title}](#{anchor(title)})"


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
