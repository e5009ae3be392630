"""A second copy of a run's checkpoints, at `trainer.default_hdfs_dir`, uploaded asynchronously to training.

The newest checkpoint is uploaded first. An upload that fails is tried a few times, then reported, and tried again
after the next save and at the end of the run. The mirror never changes the local directory, and its failures do not
end the run.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.background import Background, Task
from megarl.checkpoint.directory import STEP_PREFIX, step_in
from megarl.checkpoint.remote import Remote
from megarl.checkpoint.upload import Uploader, UploadResult
from megarl.distributed import watchdog
from megarl.distributed.exchange import on_first_rank, together

logger = logging.getLogger(__name__)

POLL_S = 0.2
STALLED_S = 600.0
"""How long the end of a run waits while nothing is uploaded."""


class Mirror:
    """Uploads the checkpoints of `directory`, which all ranks share. Public methods are collective."""

    def __init__(self, remote: Remote, directory: Path, *, keep: int | None) -> None:
        self._remote = remote
        self._directory = directory
        self._uploader = Uploader(remote, directory, keep=keep)
        self._background = Background()
        self.uploading: int | None = None  # the step that is being uploaded
        self._pending: list[int] = []  # steps that the mirror lacks; the same on all ranks, like all that follow
        self._tried: set[int] = set()  # pending steps that were tried since the last save
        self._num_failures = 0
        self._metrics: dict[str, float] = {}  # since `advance` last returned them

    def remember(self, checkpoint: Path, *, best: int | None) -> None:
        """Upload the checkpoint that the run resumes from, if the mirror lacks it, after the next save or at the end.

        A checkpoint of another directory is ignored: what the mirror has is then of another past. `best` is the step of
        the best validation.
        """
        self._uploader.best = self._uploader.arrived_best = best
        step = step_in(self._directory, checkpoint)
        if step is not None:
            self._uploader.resumed = step
            self._add(step)

    def follow(self, step: int, *, best: int | None) -> None:
        """Start to upload the checkpoint of `step`, which has just been published; `best` as in `remember`."""
        self._uploader.best = best
        self._add(step)
        self._try_all()

    def advance(self) -> dict[str, float]:
        """Resume the upload if all ranks are ready, without waiting; return metrics of finished uploads."""
        self._background.advance()
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def close(self) -> None:
        """Try once more to upload what is missing, wait while files arrive, and warn of what is still missing."""
        self._try_all()
        before = None
        since = time.monotonic()
        while self.uploading is not None:
            self._background.wait(POLL_S)
            self._background.advance()
            watchdog.note(phase="mirror")
            now = together(lambda: (self._uploader.num_bytes, self._num_failures, time.monotonic()))
            progress = [rank[:2] for rank in now]
            if progress != before:
                before = progress
                since = now[0][2]
            elif now[0][2] - since > STALLED_S:
                break
        if self._pending and dist.get_rank() == 0:
            names = ", ".join(f"{STEP_PREFIX}{step}" for step in sorted(self._pending))
            logger.warning(
                "the mirror %s lacks %s. These checkpoints are intact in %s: run the same command again, or copy them "
                "by hand",
                *(self._remote, names, self._directory),
            )

    def _add(self, step: int) -> None:
        self._pending = [other for other in self._pending if other != step]
        self._pending.append(step)
        self._uploader.forget(step)

    def _try_all(self) -> None:
        self._tried.clear()
        if self.uploading is None:
            self._background.start(self._upload_pending())

    def _upload_pending(self) -> Task:
        """Upload the pending checkpoints, the newest first, until each has been tried."""
        step = self._choose()
        while step is not None:
            self.uploading = step
            begin = time.monotonic()
            results = yield self._uploader.sending(step)
            num_bytes = sum(result.num_bytes for result in results)
            if not any(result.failure or result.is_deleted for result in results):
                results = yield self._uploader.sealing(step)
            self._record(step, results, num_bytes=num_bytes, seconds=time.monotonic() - begin)
            step = self._choose()
        self.uploading = None

    def _choose(self) -> int | None:
        """Return the newest pending step that has not been tried; steps removed locally are no longer pending."""
        local = on_first_rank(lambda: [step for step in self._pending if self._uploader.is_local(step)])
        self._uploader.deleted |= set(self._pending) - set(local)
        self._pending = local
        return max((step for step in self._pending if step not in self._tried), default=None)

    def _record(self, step: int, results: Sequence[UploadResult], *, num_bytes: int, seconds: float) -> None:
        """Record the results of an upload, and report them."""
        self._tried.add(step)
        failures = [result.failure for result in results if result.failure]
        is_first = dist.get_rank() == 0
        if failures:
            self._num_failures += 1
            if is_first:
                logger.warning(
                    "%s%d could not be mirrored to %s: %s. The local checkpoint is intact, training continues, and the "
                    "upload is tried again after the next save",
                    *(STEP_PREFIX, step, self._remote, failures[0]),
                )
        elif any(result.is_deleted for result in results):
            self._uploader.deleted.add(step)
        else:
            self._pending.remove(step)
            self._uploader.forget(step)
            if is_first:
                logger.info(
                    "%s%d is mirrored to %s, %d bytes in %.1f s", STEP_PREFIX, step, self._remote, num_bytes, seconds
                )
            self._metrics |= {
                "checkpoint/mirrored_step": float(step),
                "checkpoint/mirror_bytes": float(num_bytes),
                "checkpoint/mirror_s": seconds,
            }
        self._metrics["checkpoint/mirror_failures"] = float(self._num_failures)
