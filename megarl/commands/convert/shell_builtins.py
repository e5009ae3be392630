"""The output and the input of some programs of a shell, as functions of their words."""

import re
from collections.abc import Callable, Mapping, Sequence

from megarl.commands.convert.expand import UNKNOWN, Variable, array_of, split_at

READERS = ("read", "mapfile", "readarray")
"""Programs that read a text into variables."""
_MOST_NUMBERS = 1000


def read_into(name: str, words: Sequence[str], text: str, separators: str) -> Mapping[str, Variable]:
    """Return the variables that `read` or `mapfile` sets from a text.

    Args:
        name: of the program.
        words: its options and the names of the variables.
        text: what it reads.
        separators: characters that end a word of a line, as IFS has them.
    """
    options = "".join(word for word in words if word.startswith("-"))
    names = [word for word in words if word.isidentifier()] or ["REPLY"]
    text = text.rstrip("\n")
    if name != "read":
        return {names[-1]: array_of(text.split("\n"))}
    line = text if "d" in options else text.partition("\n")[0]
    line = line.strip("".join(set(separators) & set(" \t\n")))
    if "a" in options:
        return {names[-1]: array_of(list(filter(None, split_at(separators, line))))}
    parts = split_at(separators, line, len(names) - 1) if len(names) > 1 else [line]
    return {one: "".join(parts[number : number + 1]) for number, one in enumerate(names)}


def _arguments(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("-")]


def _numbers(words: Sequence[str]) -> str:
    """Return the output of `seq` for whole numbers, if these are not too many."""
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", word) for word in words):
        return UNKNOWN
    first, *steps, last = map(int, words) if len(words) > 1 else (1, int(words[0]))
    step = steps[0] if steps else 1
    if not step:
        return ""
    found = range(first, last + (1 if step > 0 else -1), step)
    return "\n".join(map(str, found)) if len(found) <= _MOST_NUMBERS else UNKNOWN


def _without_directory(words: Sequence[str]) -> str:
    path, ending, *_ = [*_arguments(words), "", ""]
    return path.rstrip("/").rpartition("/")[2].removesuffix(ending)


def _directory(words: Sequence[str]) -> str:
    return "".join(_arguments(words)[:1]).rstrip("/").rpartition("/")[0] or "."


PRINTERS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "echo": lambda words: " ".join(_arguments(words)),
    "seq": _numbers,
    "basename": _without_directory,
    "dirname": _directory,
}
"""Program -> what it prints, by its words."""
