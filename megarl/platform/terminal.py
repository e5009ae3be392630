"""Standard output and standard error that cannot end a run: output that cannot be written is dropped."""

import io
import sys
from contextlib import suppress
from typing import TextIO


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


def outlive_readers() -> None:
    """Keep later output of this process from raising an OSError or changing its exit code."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, Outliving):
        return stream  # None, too, if the process was started with it closed
    outliving = Outliving(
        stream.buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    outliving.stream = stream
    return outliving
