"""Which checkpoint a run continues from: the last whole one of its directory or its mirror, or the one it is told."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.contents import find_damage
from megarl.checkpoint.directory import LATEST_FILE, STEP_PREFIX, latest_step, name_latest, saved_steps
from megarl.checkpoint.fetch import fetch
from megarl.checkpoint.manifest import STATE_FILE
from megarl.checkpoint.remote import Remote
from megarl.distributed.agreement import agree
from megarl.distributed.exchange import on_first_rank
from megarl.platform.uri import WAITS_S, persist
from megarl.tracking.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)

AFRESH = "start afresh with trainer.resume_mode=disable"


def find_checkpoint(
    directory: Path, *, mode: str, path: str | None, mirror: str | None = None, waits: Sequence[float] = WAITS_S
) -> Path | None:
    """The checkpoint to continue from, None to start afresh. Collective: every file of it is looked at.

    One that lies in the `mirror` and is newer than any whole one here, or at a URI, is brought into `directory`.

    Args:
        directory: of the run.
        mode: `trainer.resume_mode`.
        path: the checkpoint of mode resume_path, a directory or a URI.
        mirror: URI or directory with copies of the run's checkpoints; None: there are none.
        waits: seconds between tries to reach it.

    Raises:
        ValueError: the ranks do not see the same steps; there is no checkpoint at the `path` of mode resume_path or it
            is damaged; none of those that the directory had is left whole; or there is none, and whether the mirror
            has one cannot be said.
    """
    if mode == "resume_path":
        return _named(str(path), directory, waits)
    if mode == "disable":
        return None
    here = last_intact(directory)
    newer = _newer(Remote(mirror), directory, _step_of(here) if here else None, waits) if mirror else None
    if not (newer or here) and (lost := on_first_rank(lambda: _lost(directory))):
        raise ValueError(f"{lost}: bring it back, name another by trainer.resume_mode=resume_path, or {AFRESH}")
    return newer or here


def last_intact_during_run(directory: Path) -> Path | None:
    """The last whole checkpoint of a run that goes on. Collective; rank 0 says which there are, as it may publish one
    meanwhile.
    """
    return _newest_intact(directory, on_first_rank(lambda: _resumable(latest_step(directory), saved_steps(directory))))


def last_intact(directory: Path) -> Path | None:
    """The last whole checkpoint of `directory` itself, None where there is none. Collective.

    None is later than the pointer says; where nothing readable is there, as after a crash before it was written or a
    copy without it, the newest counts.

    Raises:
        ValueError: the ranks do not see the same steps.
    """
    latest, saved = latest_step(directory), sorted(saved_steps(directory))
    is_damaged = latest is None and os.path.lexists(directory / LATEST_FILE)
    agree({str(directory / LATEST_FILE): "damaged" if is_damaged else latest, f"{directory / STEP_PREFIX}*": saved})
    if is_damaged:
        _warn(f"{directory / LATEST_FILE} is damaged, so that the newest whole checkpoint there counts")
    steps = _resumable(latest, saved)
    if latest is not None and latest not in steps:
        _warn(
            f"{directory / LATEST_FILE} says {latest}, which is not there, so that the newest checkpoint there counts"
        )
    if newer := [step for step in saved if step not in steps]:
        names = ", ".join(f"{STEP_PREFIX}{step}" for step in newer)
        _warn(f"{directory / LATEST_FILE} says {latest}, so that newer checkpoints are passed over: {names}")
    return _newest_intact(directory, steps)


def _resumable(latest: int | None, saved: Sequence[int]) -> list[int]:
    """Return the latest step and the saved ones before it, in order; all saved ones if that leaves none of them.

    A run names as its latest only what it has: a pointer before all that is saved is damaged.
    """
    if latest is None or all(step > latest for step in saved):
        return sorted(saved)
    return sorted({latest, *(step for step in saved if step <= latest)})


def _newest_intact(directory: Path, steps: Sequence[int]) -> Path | None:
    """The last whole one of the directory's checkpoints of `steps`, which ascend."""
    for step in reversed(steps):
        checkpoint = directory / f"{STEP_PREFIX}{step}"
        if not (damage := find_damage(checkpoint)):
            return checkpoint  # an earlier one where a crash came while the last was being replaced
        logger.warning("%s is damaged and passed over: %s", checkpoint, damage)
    return None


def _lost(directory: Path) -> str | None:
    """What says that `directory` had checkpoints, of which none is whole; None where nothing does."""
    if (latest := latest_step(directory)) is not None:
        return f"{directory / LATEST_FILE} says {latest}, but there is no whole {STEP_PREFIX}{latest} or earlier"
    if saved_steps(directory) or os.path.lexists(directory / LATEST_FILE):
        return f"{directory} had checkpoints, but none of them is whole"
    return None


def _named(path: str, directory: Path, waits: Sequence[float]) -> Path:
    if "://" in path:
        try:
            return fetch(Remote(path), directory, waits=waits)
        except Exception as error:  # each file system has errors of its own
            raise ValueError(f"trainer.resume_from_path: {error}") from error
    checkpoint = Path(path)
    if not os.path.lexists(checkpoint / STATE_FILE):  # is_file raises for names that are too long
        raise ValueError(f"trainer.resume_from_path={path} is no checkpoint: it has no {STATE_FILE}")
    if damage := find_damage(checkpoint):
        raise ValueError(f"trainer.resume_from_path={path} is damaged: {damage}; name another")
    return checkpoint


def _newer(mirror: Remote, directory: Path, than: int | None, waits: Sequence[float]) -> Path | None:
    """The last whole checkpoint of the mirror, brought here, where it is newer than step `than`.

    Raises:
        ValueError: nothing is here (`than` is None), and the mirror cannot be asked or what it has cannot be had.
    """
    try:
        there = on_first_rank(lambda: persist(mirror.resumable_steps, waits))
    except Exception as error:  # each file system has errors of its own
        problem = str(error)
    else:
        problem, wanted = "", [step for step in there if than is None or step > than]
        for step in reversed(wanted):
            try:
                fetched = fetch(mirror.checkpoint(step), directory, waits=waits)
            except Exception as error:
                problem = str(error)
                _warn(f"{STEP_PREFIX}{step} of the mirror is passed over: {problem}")
            else:
                on_first_rank(partial(_take_over, mirror, directory, step, waits))
                return fetched
    if problem and than is None:
        raise ValueError(
            f"{directory} has no whole checkpoint, and none can be had from the mirror {mirror}: {problem}; bring it "
            f"back, or {AFRESH}"
        )
    if problem:
        _warn(f"the mirror {mirror} may have a newer checkpoint than {STEP_PREFIX}{than}, which is taken: {problem}")
    return None


def _take_over(mirror: Remote, directory: Path, step: int, waits: Sequence[float]) -> None:
    """Have the run go on from a checkpoint of the mirror, with the metrics that were logged before."""
    part = directory / f".{METRICS_FILE}.part"
    try:
        if persist(lambda: mirror.has(METRICS_FILE), waits):
            persist(lambda: mirror.get(METRICS_FILE, part), waits)
            part.replace(directory / METRICS_FILE)
    except Exception as error:
        part.unlink(missing_ok=True)
        _warn(f"{mirror}/{METRICS_FILE} cannot be had, so that the metrics of earlier steps are missing: {error}")
    name_latest(directory, step)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(STEP_PREFIX))


def _warn(message: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", message)
