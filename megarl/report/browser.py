"""Pages that show all samples that a run kept: one page, and beside it a script for each file of samples.

A page that is opened from a disk may load scripts, but no data. So the samples are scripts.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from megarl.platform.files import write_whole
from megarl.platform.terminal import visible
from megarl.report.templates import template
from megarl.tracking.protocol import Row

BROWSER_FILE = "samples.html"
SCRIPTS = "samples_html"
"""The directory of the scripts, next to the page."""
FACTS = ("score", "accuracy", "answer", "failure", "truncated", "num_turns", "stop_reason", "fault")
"""The columns that the page shows of each sample, if they have a value."""
DIGITS = 3  # of a log-probability

TextOf = Callable[[int], str]
"""Returns the text of a token."""


def write_browser(
    title: str, files: Iterable[tuple[str, Sequence[Row]]], directory: Path, text_of: TextOf | None
) -> Path:
    """Write the page and its scripts, and return the page.

    Args:
        title: of the page.
        files: the name and the samples of each file, as `samples/schema.py` describes their columns. They are taken
            one by one.
        directory: of the page.
        text_of: None: the tokens have no texts, and the page shows responses as a whole.

    Raises:
        OSError: the disk refuses a file.
        Damage: a file cannot be read.
    """
    scripts = directory / SCRIPTS
    scripts.mkdir(parents=True, exist_ok=True)
    names = []
    for number, (name, samples) in enumerate(files):
        names.append(name)
        groups = [_group(list(rows), text_of) for _, rows in groupby(samples, key=lambda row: row["group"])]
        write_whole(scripts / f"{number}.js", f"show({_script(name)}, {_script(groups)});\n".encode())
    text = template("browser.html").render(title=title, names=_script(names), scripts=SCRIPTS)
    page = directory / BROWSER_FILE
    write_whole(page, text.encode(errors="replace"))
    return page


def _script(value: object) -> str:
    """Return a value as JSON that no text in it ends as a script."""
    return json.dumps(value).replace("<", "\\u003c")


def _group(rows: Sequence[Row], text_of: TextOf | None) -> dict[str, object]:
    first = rows[0]
    return {
        "prompt": visible(first["prompt"]),
        "facts": _facts(first, ("ground_truth", "data_source", "index")),
        "samples": [_sample(row, text_of) for row in rows],
    }


def _sample(row: Row, text_of: TextOf | None) -> dict[str, object]:
    found: dict[str, object] = {
        "facts": _facts(row, FACTS),
        "response": visible(row["response"]),
    }
    if text_of:
        found["tokens"] = [visible(text_of(token)) for token in row["response_ids"]]
        found["logs"] = _rounded(row["rollout_log_probs"])
        found["observed"] = row["observed"]
        found["rewards"] = _rounded(row["turn_rewards"])
    return found


def _facts(row: Row, names: Sequence[str]) -> dict[str, object]:
    """Return the columns that have a value; control characters in texts are escaped."""
    found = {name: row[name] for name in names if row[name] is not None}
    return {name: visible(value) if isinstance(value, str) else value for name, value in found.items()}


def _rounded(numbers: Iterable[float] | None) -> list[float] | None:
    return None if numbers is None else [round(number, DIGITS) for number in numbers]
