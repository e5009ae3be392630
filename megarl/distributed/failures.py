"""The report of a rank that fails: its traceback in a file of the run, and a last line that names the file.

RUN_DIR/errors/rank_3.txt    every failure of the rank, the newest last
"""

import json
import logging
import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from torch.distributed import Store

from megarl.distributed.place import Launch
from megarl.distributed.store import reported_by_rank0
from megarl.platform.errors import UserError
from megarl.platform.files import remedy
from megarl.platform.imports import import_error
from megarl.platform.secrets import format_error, redact
from megarl.platform.terminal import COMMAND, on_one_line, print_message, visible

ELASTIC_FILE = "TORCHELASTIC_ERROR_FILE"
"""torch's variable with the file in which an agent of torchrun expects the reason of a rank's failure."""
_ATTEMPTS = "megarl/failures"

logger = logging.getLogger(__name__)
_watcher: int | None = None  # the pipe to the process that watches this rank


def report_to(pipe: int) -> None:
    """Report a failure of this rank to the process that reads `pipe`, which prints the last line."""
    global _watcher
    _watcher = pipe


def report(error: Exception, directory: Path | None, launch: Launch, store: Store | None) -> str | int:
    """Keep the traceback of an error that ends this rank, and print it if this rank fails first.

    A UserError and a failed import are described by their messages alone, once if all ranks have the error.

    Args:
        error: what ended the work of this rank.
        directory: the directory of the run; nothing is kept if it does not exist, or is None.
        launch: the place of this rank.
        store: the store in which the ranks have met; None if they have not.

    Returns:
        The argument of `sys.exit`.
    """
    is_first = _is_first(store)
    path = _write_traceback(error, directory, launch.rank) if directory and directory.is_dir() else None
    if is_first and path:
        _notify(launch.rank, path)
    if isinstance(error, ImportError):
        error = import_error(error.name or "a package", error)
    if isinstance(error, UserError):
        is_reported = store is not None and reported_by_rank0(store, str(error), launch)
        return 1 if is_reported else visible(redact(f"megarl: rank {launch.rank}: {error}"))
    if is_first:
        print_message(format_error(error))
    if is_first and path and COMMAND not in os.environ:
        return last_line(launch.rank, str(path))
    return 1


def last_line(rank: int, path: str) -> str:
    """Return the line that names the rank that failed first and the file with its traceback."""
    return f"megarl: rank {rank} failed first; its traceback is in {on_one_line(path)}"


def _is_first(store: Store | None) -> bool:
    try:
        return store is None or store.add(_ATTEMPTS, 1) == 1
    except RuntimeError:  # the rank that keeps the store has gone
        return True


def _write_traceback(error: Exception, directory: Path, rank: int) -> Path | None:
    """Append the traceback to the file of this rank. None if that is impossible."""
    path = (directory / "errors" / f"rank_{rank}.txt").absolute()
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:  # of names that are not UTF-8
            file.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}\n{format_error(error)}\n\n")
    except OSError as failure:
        logger.warning("%s cannot be written: %s", path, remedy(failure))
        return None
    return path


def _notify(rank: int, path: Path) -> None:
    """Name the file to the process that watches this rank: ours, or an agent of torchrun."""
    if _watcher is not None:
        os.write(_watcher, f"{last_line(rank, str(path))}\n".encode(errors="backslashreplace"))
        return
    reason = {"message": last_line(rank, str(path)), "timestamp": int(time.time())}
    elastic = os.environ.get(ELASTIC_FILE)
    if elastic:
        with suppress(OSError):  # the agent then says that it has no reason
            Path(elastic).write_text(json.dumps(reason), encoding="utf-8")
