"""The log: records of megarl and warnings of libraries, on the console and in a file of each rank.

    RUN_DIR/log/rank_3.txt            every record of the rank
    RUN_DIR/log/rewards.txt           what the rewards and environments of rank 0 print
    RUN_DIR/log/rewards_rank_3.txt    the same of another rank

The console shows all records of rank 0, and warnings of the other ranks.
"""

import logging
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from megarl.platform.terminal import visible

LEVELS = ("debug", "info", "warning", "error")
CONSOLE_FORMAT = "%(asctime)s %(levelname)s rank %(rank)d: %(message)s"
FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s rank %(rank)d %(name)s: %(message)s"
PRINTED_FORMAT = "%(asctime)s %(message)s"
LOG_DIRECTORY = "log"  # in the directory of a run
CLOCK = "%H:%M:%S"
DATE = "%Y-%m-%d %H:%M:%S"
_megarl = logging.getLogger("megarl")
printed = logging.getLogger("megarl.printed")
"""Takes what rewards and environments print."""
printed.setLevel(logging.INFO)
printed.propagate = False


class _Console(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the time of the record: a progress bar replaces it while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        raise AttributeError("the console is standard error")


class _Formatter(logging.Formatter):
    """Writes records that no terminal obeys, neither now nor when the file is shown."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _File(logging.FileHandler):
    """Makes its directory with its first record, and gives up with a warning if it cannot write."""

    def __init__(self, path: Path, logger: logging.Logger) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._logger = logger

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # raised while the file is opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._logger.removeHandler(self)
        _megarl.warning("the log %s ends here, because it cannot be written: %s", self.baseFilename, error)


def set_level(level: str) -> None:
    """Record messages of megarl from one of LEVELS on."""
    _megarl.setLevel(level.upper())


def show_on_console(rank: int) -> None:
    """Show the records of this rank on standard error."""
    if _megarl.level == logging.NOTSET:
        set_level("info")
    handler = _Console()
    handler.setLevel(logging.NOTSET if rank == 0 else logging.WARNING)
    _install(handler, _Formatter(CONSOLE_FORMAT, CLOCK, defaults={"rank": rank}), logging.getLogger())


def log_to_files(directory: Path, rank: int) -> None:
    """Append the records of this rank, and what its rewards print, to files in `directory`, the directory of a run."""
    rewards = "rewards.txt" if rank == 0 else f"rewards_rank_{rank}.txt"
    for name, logger, form in (
        (f"rank_{rank}.txt", logging.getLogger(), FILE_FORMAT),
        (rewards, printed, PRINTED_FORMAT),
    ):
        handler = _File(directory / LOG_DIRECTORY / name, logger)
        _install(handler, _Formatter(form, DATE, defaults={"rank": rank}), logger)


def show_printed(*, on_console: bool) -> None:
    """Show on the console what rewards and environments print, as the records of a rank, or stop to show it."""
    printed.propagate = on_console


def _install(handler: logging.Handler, formatter: logging.Formatter, logger: logging.Logger) -> None:
    """Add a handler to a logger; it replaces one of its kind."""
    for other in [one for one in logger.handlers if type(one) is type(handler)]:
        logger.removeHandler(other)
        other.close()
    handler.setFormatter(formatter)
    logger.addHandler(handler)
