"""The run's checkpoints a second time, at `trainer.default_hdfs_dir`, brought there while training goes on.

A checkpoint there is whole or not there: an older manifest of its name goes first, every rank uploads its share of the
files, and when all have done so the first one writes the manifest, and then the pointer to the latest. The newest goes
first. What fails is tried a few times, then reported, and tried again after the next save and at the end of the run.
Nothing here changes the local directory, and nothing that happens to the mirror ends the run.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megarl.checkpoint.background import Background, Task
from megarl.checkpoint.directory import LATEST_FILE, STEP_PREFIX, latest_step, step_of_name
from megarl.checkpoint.manifest import MANIFEST_FILE, Seal, parse_manifest
from megarl.checkpoint.remote import Remote, share_of
from megarl.distributed import watchdog
from megarl.distributed.exchange import on_first_rank, together
from megarl.platform.small_files import read_bytes
from megarl.platform.uri import WAITS_S, persist
from megarl.tracking.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.2
STALLED_S = 600.0
"""At the end of a run, how long to wait for a mirror that takes nothing."""


@dataclass(frozen=True)
class UploadResult:
    """What came of one rank's part of the work on a checkpoint."""

    num_bytes: int = 0  # uploaded
    failure: str | None = None
    gone: bool = False  # the local checkpoint was removed meanwhile


class Mirror:
    """Follows the checkpoints of `directory`, of which all ranks see the same. Public methods are collective."""

    def __init__(
        self,
        remote: Remote,
        directory: Path,
        *,
        keep: int | None,
        waits: Sequence[float] = WAITS_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._remote, self._directory, self._keep = remote, directory, keep
        self._waits, self._stalled_s = waits, stalled_s
        self._background = Background()
        self._pending: list[int] = []  # steps that are not there yet; like all but the last two, the same on all ranks
        self._tried: set[int] = set()  # of the pending ones, since the last save
        self._gone: set[int] = set()  # removed here before they were known to be whole there
        self._num_failures = 0
        self._metrics: dict[str, float] = {}  # since they were last asked for
        self.under_way: int | None = None  # the step that is being uploaded
        self._sent: defaultdict[int, set[str]] = defaultdict(set)  # step -> files that this rank has uploaded
        self._num_sent = 0  # bytes, by this rank

    def remember(self, checkpoint: Path) -> None:
        """One that the run goes on from may be missing in the mirror; it is seen to after the next save, or at the end.

        What lies in another directory, or has another name, is not followed.
        """
        step = step_of_name(checkpoint.name)
        if checkpoint.parent == self._directory and step is not None:
            self._miss(step)

    def follow(self, step: int) -> None:
        """Begin to upload the checkpoint of `step`, which has just been published."""
        self._miss(step)
        self._try_all()

    def advance(self) -> dict[str, float]:
        """Let the upload go on where all ranks are ready, without waiting; returns metrics of what came to an end."""
        self._background.advance()
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """Try once more what is missing, wait for it as long as files arrive, and say what is missing then."""
        self._try_all()
        before, since = None, time.monotonic()
        while self.under_way is not None:
            time.sleep(POLL_S)
            self._background.advance()
            watchdog.note(phase="mirror")
            now = together(lambda: (self._num_sent, self._num_failures, time.monotonic()))
            if (moved := [rank[:2] for rank in now]) != before:
                before, since = moved, now[0][2]
            elif now[0][2] - since > self._stalled_s:
                break
        if self._pending and dist.get_rank() == 0:
            names = ", ".join(f"{STEP_PREFIX}{step}" for step in sorted(self._pending))
            logger.warning(
                "the mirror %s is not complete: %s are missing there. They are whole in %s: start the same command "
                "again, or copy them by hand",
                *(self._remote, names, self._directory),
            )

    def _miss(self, step: int) -> None:
        self._pending = [*(other for other in self._pending if other != step), step]
        self._sent.pop(step, None)

    def _try_all(self) -> None:
        self._tried.clear()
        if self.under_way is None:
            self._background.start(self._upload_pending())

    def _upload_pending(self) -> Task:
        """Upload what is missing, the newest first, until nothing is left that has not been tried."""
        while (step := self._choose()) is not None:
            self.under_way, begun = step, time.monotonic()
            outcomes = yield self._work(step, self._send)
            sent = sum(outcome.num_bytes for outcome in outcomes)
            if not any(outcome.failure or outcome.gone for outcome in outcomes):
                outcomes = yield self._work(step, self._seal)
            self._take_note(step, outcomes, num_bytes=sent, seconds=time.monotonic() - begun)
        self.under_way = None

    def _choose(self) -> int | None:
        """The newest step that is missing and has not been tried; what was removed locally is missed no longer."""
        here = on_first_rank(lambda: [step for step in self._pending if (self._local(step) / MANIFEST_FILE).is_file()])
        self._gone |= set(self._pending) - set(here)
        self._pending = here
        return max((step for step in self._pending if step not in self._tried), default=None)

    def _take_note(self, step: int, outcomes: Sequence[UploadResult], *, num_bytes: int, seconds: float) -> None:
        """Remember what came of a checkpoint, and tell it."""
        self._tried.add(step)
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        is_first = dist.get_rank() == 0
        if failures:
            self._num_failures += 1
            if is_first:
                logger.warning(
                    "%s%d could not be mirrored to %s: %s. The local one is whole, training goes on, and it is tried "
                    "again after the next save",
                    *(STEP_PREFIX, step, self._remote, failures[0]),
                )
        elif any(outcome.gone for outcome in outcomes):
            self._gone.add(step)
        else:
            self._pending.remove(step)
            self._sent.pop(step, None)
            if is_first:
                print(
                    f"megarl: {STEP_PREFIX}{step} is mirrored to {self._remote}, {num_bytes} bytes in {seconds:.1f} s"
                )
            self._metrics |= {
                "checkpoint/mirrored_step": float(step),
                "checkpoint/mirror_bytes": float(num_bytes),
                "checkpoint/mirror_s": seconds,
            }
        self._metrics["checkpoint/mirror_failures"] = float(self._num_failures)

    def _work(self, step: int, part: Callable[[int], int]) -> Callable[[], UploadResult]:
        """A part of the work in a thread beside training, with whatever comes of it as the answer."""

        def work() -> UploadResult:
            try:
                return UploadResult(num_bytes=part(step))
            except Exception as error:  # each file system has errors of its own
                if not (self._local(step) / MANIFEST_FILE).is_file():
                    return UploadResult(gone=True)
                return UploadResult(failure=f"{type(error).__name__}: {error}")

        return work

    def _send(self, step: int) -> int:
        """Upload this rank's share of a checkpoint's files, unless it is there; returns the bytes."""
        manifest, name = read_bytes(self._local(step) / MANIFEST_FILE), f"{STEP_PREFIX}{step}/{MANIFEST_FILE}"
        if dist.get_rank() == 0:
            self._persist(self._disown_later)
        if (there := self._persist(lambda: self._remote.read(name))) == manifest:
            return 0
        if there is not None:  # of another run, or of this one before it went back
            self._persist(lambda: self._remote.delete(name))
        num_bytes = 0
        for file, seal in share_of(parse_manifest(manifest, self._local(step)), dist.get_rank(), dist.get_world_size()):
            if file not in self._sent[step]:
                self._persist(partial(self._put, step, file, seal))
                self._sent[step].add(file)
                num_bytes += seal[0]
        return num_bytes

    def _put(self, step: int, file: str, seal: Seal) -> None:
        self._remote.put(self._local(step) / file, f"{STEP_PREFIX}{step}/{file}", seal, self._count)

    def _count(self, num_bytes: int) -> None:
        self._num_sent += num_bytes

    def _disown_later(self) -> None:
        """Where the mirror calls a checkpoint its latest that the run has gone back behind, say so there."""
        latest, there = latest_step(self._directory), self._remote.latest()
        if latest is not None and there is not None and there > latest:
            self._remote.write(LATEST_FILE, str(latest).encode())

    def _seal(self, step: int) -> int:
        """Once all files are there: the metrics so far, the manifest, the pointer, and away with the oldest."""
        if dist.get_rank() == 0:
            if (metrics := self._directory / METRICS_FILE).is_file():
                self._persist(lambda: self._remote.write(METRICS_FILE, metrics.read_bytes()))
            manifest, name = read_bytes(self._local(step) / MANIFEST_FILE), f"{STEP_PREFIX}{step}/{MANIFEST_FILE}"
            if self._persist(lambda: self._remote.read(name)) != manifest:
                self._persist(lambda: self._remote.write(name, manifest))
            latest = self._persist(self._remote.latest)
            if latest is None or latest < step:
                self._persist(lambda: self._remote.write(LATEST_FILE, str(step).encode()))
            try:
                self._persist(self._remove_old)
            except Exception as error:  # what is there is whole, and no reason to upload it again
                logger.warning("old checkpoints in %s could not be removed: %s", self._remote, error)
        return 0

    def _remove_old(self) -> None:
        old = self._remote.resumable_steps()[: -self._keep] if self._keep else []
        for step in {*old, *self._gone.difference(self._remote.complete_steps())}:
            self._remote.remove(step)
        self._gone.clear()

    def _persist(self, work: Callable[[], T]) -> T:
        return persist(work, self._waits)

    def _local(self, step: int) -> Path:
        return self._directory / f"{STEP_PREFIX}{step}"
