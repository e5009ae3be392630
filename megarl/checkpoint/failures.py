"""Saves that the disk does not take: training goes on without them, unless nothing comes after.

All ranks see the same errors, so all decide alike.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.background import Task
from megarl.checkpoint.directory import STEP_PREFIX
from megarl.distributed.exchange import together
from megarl.platform.files import WriteError, explained, reserve

logger = logging.getLogger(__name__)

SMALL_BYTES = 1 << 20  # of a rank's files beside the models


class Failures:
    """What became of the saves of one run."""

    def __init__(self) -> None:
        self._count = 0
        self._last: WriteError | None = None  # of the save that was tried last

    @contextmanager
    def tolerated(self, directory: Path) -> Iterator[None]:
        """Report a save inside that cannot be written, and remove what it left in `directory`."""
        try:
            yield
        except WriteError as error:
            self._count += 1
            self._last = error
            if dist.get_rank() == 0:
                for part in directory.glob(f".{STEP_PREFIX}*.part"):
                    shutil.rmtree(part, ignore_errors=True)
                logger.warning("a save failed, training goes on and the next one tries again: %s", error)

    def over(self) -> None:
        """The save that was tried last is whole."""
        self._last = None

    def metrics(self) -> dict[str, float]:
        """How many saves failed, as `checkpoint/failed_saves`; nothing while none did."""
        return {"checkpoint/failed_saves": float(self._count)} if self._count else {}

    def raise_last(self) -> None:
        """Raise WriteError where the save that was tried last failed."""
        if self._last:
            raise WriteError(f"the last steps are not saved: {self._last}")


def require_space(directory: Path, num_bytes: int) -> None:
    """Find out whether `directory` can take so many bytes, by taking them. Collective.

    A rank that has an error while others are in a collective leaves them there, so it is better known before.

    Raises:
        WriteError: some rank cannot have its share; on all.
    """
    probe, share = directory / f".room-{dist.get_rank()}", num_bytes // dist.get_world_size() + SMALL_BYTES
    needed, free = _gb(share * dist.get_world_size()), _free(directory)
    what = f"a checkpoint of about {needed} GB in {directory.parent}, where {free} GB are free,"

    def take() -> None:
        with explained(what), probe.open("wb") as file:
            reserve(file, share)

    together(take)
    together(probe.unlink)


def with_write_errors(task: Task, what: str) -> Task:
    """The same task, but errors of a file system are WriteErrors: what they come from would not reach all ranks."""
    answers: Any = None
    while True:
        try:
            with explained(what):
                work = task.send(answers)
        except StopIteration:
            return
        answers = yield partial(_explained, what, work)


def _explained(what: str, work: Callable[[], Any]) -> Any:
    with explained(what):
        return work()


def warn_of_space(directory: Path, num_bytes: int) -> None:
    """Say so where a checkpoint does not fit on the disk of `directory`."""
    if dist.get_rank() == 0 and shutil.disk_usage(directory).free < num_bytes:
        logger.warning(
            "a checkpoint takes about %s GB, and only %s GB are free in %s: free space there, or name a directory on "
            "another disk (trainer.default_local_dir)",
            _gb(num_bytes),
            _free(directory),
            directory,
        )


def _free(directory: Path) -> str:
    return _gb(shutil.disk_usage(directory).free)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g}"
