"""Failed saves: training continues without them, except after the last save of a run.

All ranks see the same errors, so all decide alike.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.background import LocalWork, Task
from megarl.checkpoint.directory import STEP_PREFIX
from megarl.distributed.exchange import together
from megarl.platform.files import WriteError, explained, reserve

logger = logging.getLogger(__name__)

SMALL_BYTES = 1 << 20  # of a rank's files besides the models


class Failures:
    """Counts the failed saves of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._last: WriteError | None = None  # of the most recent save

    @contextmanager
    def tolerated(self) -> Iterator[None]:
        """Report a save inside the block that fails, and remove what it left in the run's directory."""
        try:
            yield
        except WriteError as error:
            self._count += 1
            self._last = error
            if dist.get_rank() == 0:
                for part in self._directory.glob(f".{STEP_PREFIX}*.part"):
                    shutil.rmtree(part, ignore_errors=True)
                logger.warning("a save failed; training continues, and the next save tries again: %s", error)

    def clear(self) -> None:
        """Record that the most recent save is complete."""
        self._last = None

    def metrics(self) -> dict[str, float]:
        """Return the number of failed saves as `checkpoint/failed_saves`; nothing if none failed."""
        return {"checkpoint/failed_saves": float(self._count)} if self._count else {}

    def raise_last(self) -> None:
        """Raise WriteError if the most recent save failed."""
        if self._last:
            raise WriteError(f"the last steps are not saved: {self._last}")


def require_space(directory: Path, num_bytes: int) -> None:
    """Check that `directory` has space for `num_bytes`, by reserving them for a moment. Collective.

    A rank that runs out of space during a collective would leave the others waiting, so the check comes before.

    Raises:
        WriteError: on all ranks, if some rank cannot reserve its share.
    """
    probe = directory / f".room-{dist.get_rank()}"
    share = num_bytes // dist.get_world_size() + SMALL_BYTES
    needed = _gb(share * dist.get_world_size())

    def try_share() -> None:
        what = f"a checkpoint of about {needed} GB in {directory.parent}, which has {_free(directory)} GB free,"
        with explained(what), probe.open("wb") as file:
            reserve(file, share)

    together(try_share)
    together(probe.unlink)


def with_write_errors(task: Task, what: str) -> Task:
    """Return the same task with errors of the file system as WriteErrors, whose text says all on every rank."""
    results: Any = None
    while True:
        try:
            with explained(what):
                work = task.send(results)
        except StopIteration:
            return
        results = yield partial(_explained, what, work)


def _explained(what: str, work: LocalWork) -> object:
    with explained(what):
        return work()


def warn_of_space(directory: Path, num_bytes: int) -> None:
    """Warn if a checkpoint does not fit on the disk of `directory`."""
    if dist.get_rank() == 0 and shutil.disk_usage(directory).free < num_bytes:
        logger.warning(
            "a checkpoint takes about %s GB, and only %s GB are free in %s: make space there, or name a directory on "
            "another disk (trainer.default_local_dir)",
            _gb(num_bytes),
            _free(directory),
            directory,
        )


def _free(directory: Path) -> str:
    return _gb(shutil.disk_usage(directory).free)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g}"
