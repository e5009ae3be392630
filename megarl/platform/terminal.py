"""The terminal of a command: what its user typed, output that cannot end the run, and text that is only shown."""

import io
import re
import shlex
import shutil
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import TextIO

COMMAND = "MEGARL_COMMAND"
"""The variable with the command that a person typed to start the ranks of this host without a launcher."""
PROGRAM = "megarl"
"""The name of the installed script."""
_KEPT = "\n\t\u200c\u200d"  # the joiners are part of words and of emoji
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control and format characters, halves of characters, separators of lines."""
_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e\xa1-\xac\xae-\u02ff]")


class Outliving(io.TextIOWrapper):
    """A text stream that drops output if writing fails: on a closed pipe, a lost terminal, a full disk."""

    stream: TextIO  # the owner of the file, which is closed when it is garbage-collected

    def write(self, text: str, /) -> int:
        """Write the text, unless that fails."""
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, unless that fails."""
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        """Flush, and leave the file open, because another stream owns it."""
        self.flush()


def typed() -> str:
    """Return the command line of this process as its user typed it, without the interpreter that the script names."""
    program = sys.argv[0]
    if Path(program).name != PROGRAM:
        return shlex.join(sys.orig_argv)
    return shlex.join([PROGRAM if shutil.which(PROGRAM) == program else program, *sys.argv[1:]])


def print_message(text: str) -> None:
    """Print lines on standard error in one write, so that the output of other processes does not come between them."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Return `text` with an escape such as `\\x1b` for each character that a terminal obeys instead of showing it."""
    return _UNUSUAL.sub(lambda found: _escaped(found[0]), text)


def on_one_line(text: str) -> str:
    """Return `text` as `visible` does, with an escape for the end of each line too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters; `...` replaces the end of a longer one."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def ignore_broken_pipe() -> None:
    """Keep later output of this process from raising an OSError or changing its exit code."""
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def _escaped(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _OBEYED:
        return character
    return character.encode("unicode_escape").decode()


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, Outliving):
        return stream  # None, too, if the process was started with it closed
    outliving = Outliving(
        stream.buffer,
        encoding=stream.encoding,
        errors="backslashreplace",  # of a terminal without all letters, and of halves of characters
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    outliving.stream = stream
    return outliving
