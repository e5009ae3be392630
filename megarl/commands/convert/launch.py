"""The launch of a training in a script: the program, and its arguments."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.commands.convert.expand import links
from megarl.commands.convert.shell import Program, follow_script
from megarl.platform.errors import UserError

_KEY = re.compile(r"(?:\+{1,2}|~)?[A-Za-z_]\w*(?:\.[\w-]+)+=?.*", re.DOTALL)
_FLAG = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
_FILE = re.compile(r"--config(-name)?(=.*)?", re.DOTALL)
_NO_TRAINERS = ("torch.distributed.run", "sglang.launch_server", "accelerate.commands.launch")
_LEAST_KEYS = 3  # of a launch that names no file of keys


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The words behind the program of a training."""

    program: str
    words: tuple[str, ...]
    line: int
    others: int = 0  # further launches of the script
    stray: tuple[str, ...] = ()  # keys and flags that stand outside of every command


def find_launch(text: str, arguments: Sequence[str] = (), variables: Sequence[tuple[str, str]] = ()) -> Launched:
    """Return the launch with the most keys.

    Raises:
        UserError: there is none, or the script cannot be read.
    """
    found: list[Launched] = []
    stray: list[str] = []
    for command in follow_script(text, arguments, variables):
        if _is_argument(command.words[0]):
            stray.extend(word for word in command.words if _KEY.fullmatch(word) or _FLAG.fullmatch(word))
            continue
        launched = _launched(command)
        if launched:
            found.append(launched)
    if not found:
        raise UserError("no command of the script has keys such as data.train_files=... or flags of a trainer")
    best = max(found, key=lambda one: len(one.words))
    return replace(best, others=len(found) - 1, stray=tuple(map(links, stray)))


def _is_argument(word: str) -> bool:
    return bool(("=" in word and _KEY.fullmatch(word)) or _FLAG.fullmatch(word))


def _launched(command: Program) -> Launched | None:
    """Return a command as a launch, if it is one."""
    words = command.words
    for start, word in enumerate(words[:-1]):
        is_module = start and words[start - 1] in ("-m", "--module") and "." in word and word not in _NO_TRAINERS
        is_command = word == "trl" or (word in ("swift", "megatron") and words[start + 1] == "rlhf")
        if is_module or is_command or (word.endswith(".py") and "=" not in word):
            return _enough(word, words[start + 1 :], command.line)
    start = next((at for at, word in enumerate(words) if _KEY.fullmatch(word) and "=" in word), 0)
    return _enough(words[max(start - 1, 0)], words[start:], command.line) if start else None


def _enough(program: str, words: Sequence[str], line: int) -> Launched | None:
    keys = sum(map(_is_argument, words))
    if keys < _LEAST_KEYS and not any(map(_FILE.fullmatch, words)):
        return None
    return Launched(program=program, words=tuple(filter(None, words)), line=line)


def is_command_line(source: str) -> bool:
    """Return whether a source is a command line: it has blanks, and no file has this name."""
    return any(map(str.isspace, source.strip())) and not os.path.isfile(source)  # noqa: PTH113 - a Path raises if the name is long


def read_source(source: str) -> str:
    """Return the text of a script, or a command line as a script.

    Raises:
        UserError: there is no such file, or it is no text.
    """
    if is_command_line(source):
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{shlex.quote(source)} cannot be read: {type(error).__name__}") from error
