"""Standard output and standard error that cannot end a run: what nobody reads any more, or no disk takes, is lost."""

import io
import sys
from contextlib import suppress
from typing import TextIO


class Outliving(io.TextIOWrapper):
    """A text stream that drops what its file does not take: a closed pipe, a terminal that is gone, a full disk."""

    stream: TextIO  # whose file it is, which would be closed with its end

    def write(self, text: str, /) -> int:
        """Write what can be written."""
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Hand on what can be handed on."""
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        """Leave the file open: it is that of another stream."""
        self.flush()


def outlive_readers() -> None:
    """Let no later output of this process raise an OSError, nor spoil its exit code."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, Outliving):
        return stream  # None too, where the process was started with it closed
    outliving = Outliving(
        stream.buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    outliving.stream = stream
    return outliving
