"""Uploads of one rank to the mirror of a run's checkpoints.

Every rank uploads its share of a checkpoint's files. The first rank removes an older manifest of the same step before,
and writes the manifest and the pointer to the latest checkpoint after, so an incomplete checkpoint has no manifest.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.background import LocalWork
from megarl.checkpoint.directory import LATEST_FILE, MANIFEST_FILE, STEP_PREFIX, latest_step
from megarl.checkpoint.manifest import parse_manifest
from megarl.checkpoint.remote import Remote, share_of
from megarl.platform.small_files import read_bytes
from megarl.tracking.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UploadResult:
    """The result of one rank's work on a checkpoint."""

    num_bytes: int = 0  # uploaded
    failure: str | None = None
    is_deleted: bool = False  # the local checkpoint was removed in the meantime


class Uploader:
    """Uploads from the local `directory` of a run to its mirror `remote`. Nothing here is collective."""

    def __init__(self, remote: Remote, directory: Path, *, keep: int | None) -> None:
        self.remote = remote
        self.directory = directory
        self._keep = keep
        self._own: set[int] = set()  # steps that this process has begun to upload
        self._uploaded: defaultdict[int, set[str]] = defaultdict(set)  # step -> files that this rank has uploaded
        self.best: int | None = None  # the step of the best validation
        self.arrived_best: int | None = None  # the last one that the mirror had
        self.num_bytes = 0  # uploaded by this rank so far
        self.deleted: set[int] = set()  # steps removed locally before the mirror was known to have them
        self.resumed: int | None = None  # a step of `directory`; what the mirror has of later steps is of another past

    def is_local(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is complete in the local directory."""
        return (self._local(step) / MANIFEST_FILE).is_file()

    def forget(self, step: int) -> None:
        """Upload all files of `step` again next time."""
        self._uploaded.pop(step, None)

    def sending(self, step: int) -> LocalWork:
        """Return work that uploads this rank's share of the files, if the mirror lacks the checkpoint."""
        return partial(self._attempt, step, self._send)

    def sealing(self, step: int) -> LocalWork:
        """Return work that completes an uploaded checkpoint, and removes old and abandoned ones from the mirror."""
        return partial(self._attempt, step, self._seal)

    def _attempt(self, step: int, work: Callable[[int], int]) -> UploadResult:
        try:
            return UploadResult(num_bytes=work(step))
        except Exception as error:  # each file system has errors of its own
            if not self.is_local(step):
                return UploadResult(is_deleted=True)
            return UploadResult(failure=f"{type(error).__name__}: {error}")

    def _send(self, step: int) -> int:
        """Return the number of bytes uploaded."""
        manifest, name = self._manifest(step)
        if dist.get_rank() == 0:
            self._lower_latest()
            self._own.add(step)
        existing = self.remote.read(name)
        if existing == manifest:
            return 0
        if existing is not None:  # of another run, or of this run before it resumed from an earlier step
            self.remote.delete(name)
        num_bytes = 0
        for file, seal in share_of(parse_manifest(manifest, self._local(step)), dist.get_rank(), dist.get_world_size()):
            if file not in self._uploaded[step]:
                self.remote.put(self._local(step) / file, f"{STEP_PREFIX}{step}/{file}", seal, self._count)
                self._uploaded[step].add(file)
                num_bytes += seal[0]
        return num_bytes

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _lower_latest(self) -> None:
        """Lower the mirror's pointer if it names a step of another past: the run resumed from before it."""
        latest = latest_step(self.directory) if self._own or self.resumed is None else self.resumed
        mirrored = self.remote.latest()
        if latest is not None and mirrored is not None and mirrored > latest:
            self.remote.write(LATEST_FILE, str(latest).encode())

    def _seal(self, step: int) -> int:
        """Write the metrics so far, the manifest and the pointer, then remove old checkpoints; the first rank does."""
        if dist.get_rank() == 0:
            metrics = self.directory / METRICS_FILE
            if metrics.is_file():
                self.remote.write(METRICS_FILE, metrics.read_bytes())
            manifest, name = self._manifest(step)
            if self.remote.read(name) != manifest:
                self.remote.write(name, manifest)
            with self._removing():
                self._remove_abandoned(step)
            latest = self.remote.latest()
            if latest is None or latest < step:
                self.remote.write(LATEST_FILE, str(step).encode())
            with self._removing():
                self._remove_old()
        return 0

    @contextmanager
    def _removing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the new checkpoint is complete, and need not be uploaded again
            logger.warning("old checkpoints in %s could not be removed: %s", self.remote, error)

    def _remove_abandoned(self, step: int) -> None:
        """Remove what the mirror has of another past, between the resumed step and `step`."""
        if self.resumed is None:
            return
        for other in self.remote.complete_steps():
            if self.resumed < other < step and other not in self._own:
                self.remote.remove(other)

    def _remove_old(self) -> None:
        """Remove checkpoints beyond `keep`, and what was uploaded of deleted checkpoints that are incomplete.

        The best stays, and the best before it until this one has arrived.
        """
        if self.best is None or self.best in self.remote.complete_steps():
            self.arrived_best = self.best
        old = self.remote.resumable_steps()[: -self._keep] if self._keep else []
        old = [step for step in old if step not in (self.best, self.arrived_best)]
        for step in {*old, *self.deleted.difference(self.remote.complete_steps())}:
            self.remote.remove(step)
        self.deleted.clear()

    def _manifest(self, step: int) -> tuple[bytes, str]:
        """Return the content of the local manifest of `step`, and its name in the mirror."""
        return read_bytes(self._local(step) / MANIFEST_FILE), f"{STEP_PREFIX}{step}/{MANIFEST_FILE}"

    def _local(self, step: int) -> Path:
        return self.directory / f"{STEP_PREFIX}{step}"
