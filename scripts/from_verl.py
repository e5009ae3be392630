"""Measure how many launch scripts of verl start as they are, and how many are converted.

`python scripts/from_verl.py DIRECTORY ...` looks at each `*.sh` that launches a training, a `main_...`, and runs none.
Values that only another machine could have are replaced: paths, also empty ones, and what comes from the environment or
from another program.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.commands.convert.converted import Converted
from megarl.commands.convert.expand import UNKNOWN, unset_names
from megarl.commands.convert.launch import Launched, find_launch
from megarl.commands.convert.translate import convert_launch
from megarl.commands.convert.write import to_text
from megarl.config.faults import ConfigError, Fault
from megarl.config.layers import Layer
from megarl.config.links import parse
from megarl.config.load import foreign_keys, load_config, try_layer, written_keys
from megarl.config.root import Config
from megarl.platform.errors import UserError

BUDGETS = ("max_token_len_per_gpu", "max_num_batched_tokens")
TRAINING = re.compile(r"main_(?!generation|eval)")
PLACE = re.compile(r".*(path|files?|dir|name)", re.DOTALL)


@dataclass(frozen=True)
class Script:
    """The launch of one script."""

    launched: Launched

    @property
    def keys(self) -> set[str]:
        """Return the keys that the script writes."""
        return {word.partition("=")[0].lstrip("+") for word in self.launched.words if "=" in word}

    def faults(self) -> list[Fault]:
        """Return why the script does not start as it is; files, models and ranks are not looked at."""
        try:
            load_config(self.launched.words, world_size=None, check_paths=False)
        except ConfigError as error:
            return list(error.faults)
        return []

    def convert(self) -> Converted:
        """Return what `megarl convert` makes of the script."""
        return convert_launch(self.launched, base=Path("/nonexistent"))


def read_scripts(directory: Path) -> Iterator[Script]:
    """Yield the scripts below a directory that launch a training of verl."""
    for path in sorted(directory.rglob("*.sh")):
        try:
            launched = find_launch(path.read_text(encoding="utf-8"))
        except (UserError, UnicodeDecodeError):
            continue
        if TRAINING.search(launched.program):
            yield Script(replace(launched, words=tuple(filter(None, map(_anywhere, launched.words)))))


def _anywhere(word: str) -> str:
    """Return a word with `text` for a place; an empty word if only another machine could tell its value."""
    key, _, value = word.partition("=")
    is_foreign = UNKNOWN in value or bool(unset_names(value))
    if PLACE.fullmatch(key) and ("/" in value or is_foreign or word == f"{key}="):
        return f"{key}=text"
    return "" if is_foreign else word


def is_set_aside(fault: Fault) -> bool:
    """Return whether a fault is that of a missing feature or of a budget of tokens."""
    return fault.missing or any(word in fault.message or word in fault.path for word in BUDGETS)


def silent(script: Script, faults: Sequence[Fault]) -> set[str]:
    """Return the keys that a run neither has nor mentions."""
    words = script.launched.words
    told = {remark.written for remark in foreign_keys(Config, words)} | {fault.path.lstrip("+") for fault in faults}
    known = written_keys(Config, words).keys() | told
    return {key for key in script.keys if not _covered(key, known)}


def silent_conversions(script: Script, found: Converted, text: str) -> set[str]:
    """Return the keys that neither the configuration nor a comment of the converted file names."""
    return {key for key in script.keys if not _covered(key, found.leaves) and key not in text}


def _covered(key: str, known: Iterable[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for one in known)


def is_loadable(text: str) -> bool:
    """Return whether a converted file has neither unknown keys nor values of wrong types."""
    _, faults, _ = try_layer(Layer(origin="", tree=parse(text) or {}))
    return not [fault for fault in faults if "has no value" not in fault.message]


@dataclass(kw_only=True)
class Figures:
    """The shares of some scripts."""

    scripts: int = 0
    start: int = 0  # as they are
    start_aside: int = 0  # missing features and budgets of tokens aside
    converted: int = 0  # to a file that loads
    undecided: int = 0  # of these, those with something to decide
    silent: int = 0  # keys


def measure(scripts: Sequence[Script]) -> Figures:
    """Return the figures of some scripts."""
    total = Figures(scripts=len(scripts))
    for script in scripts:
        faults = script.faults()
        found = script.convert()
        text = to_text(found, "a script")
        total.start += not faults
        total.start_aside += all(map(is_set_aside, faults))
        total.converted += is_loadable(text)
        total.undecided += bool(found.decisions)
        total.silent += len(silent(script, faults)) + len(silent_conversions(script, found, text))
    return total


def main(directories: Sequence[str]) -> None:
    """Print a table with a row for each directory."""
    print("| scripts of | number | start as they are | start, aside | converted | with a decision | silent keys |")
    print("|---|---|---|---|---|---|---|")
    for directory in map(Path, directories):
        found = measure(list(read_scripts(directory)))
        counts = (found.start, found.start_aside, found.converted)
        shares = (f"{count} ({count / max(found.scripts, 1):.0%})" for count in counts)
        print(f"| {directory.name} | {found.scripts} | {' | '.join(shares)} | {found.undecided} | {found.silent} |")


if __name__ == "__main__":
    main(sys.argv[1:])
