"""The checkpoint that a run resumes from: the last intact one of its directory or its mirror, or a named one."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.contents import find_damage
from megarl.checkpoint.directory import (
    LATEST_FILE,
    STATE_FILE,
    STEP_PREFIX,
    latest_step,
    name_latest,
    saved_steps,
    step_of_name,
)
from megarl.checkpoint.fetch import fetch
from megarl.checkpoint.remote import Remote
from megarl.distributed.agreement import agree
from megarl.distributed.exchange import on_first_rank
from megarl.platform.errors import UserError
from megarl.platform.uri import is_uri
from megarl.tracking.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)

AFRESH = "start afresh with trainer.resume_mode=disable"


def find_checkpoint(directory: Path, *, mode: str, path: str | None, mirror: str | None = None) -> Path | None:
    """Return the checkpoint to resume from, None to start afresh. Collective: every file of it is checked.

    A checkpoint at a URI, or of the `mirror` if it is newer than every intact local one, is copied into `directory`.

    Args:
        directory: of the run.
        mode: `trainer.resume_mode`.
        path: the checkpoint of mode resume_path, a directory or a URI.
        mirror: URI or directory with copies of the run's checkpoints; None: there are none.

    Raises:
        UserError: the ranks do not see the same steps; the checkpoint of mode resume_path is missing or damaged; the
            directory had checkpoints, but none is intact; or there is no local checkpoint and the mirror is
            unreachable.
    """
    if mode == "resume_path":
        return _named(str(path), directory)
    if mode == "disable":
        return None
    local = last_intact(directory)
    newer = None
    if mirror:
        own_step = step_of_name(local.name) if local else None
        newer = _newer(Remote(mirror), directory, own_step)
    found = newer or local
    lost = None if found else on_first_rank(lambda: _lost(directory))
    if lost:
        raise UserError(f"{lost}: restore it, name another by trainer.resume_mode=resume_path, or {AFRESH}")
    return found


def last_intact_during_run(directory: Path) -> Path | None:
    """Return the last intact checkpoint of a running job. Collective.

    Rank 0 lists the checkpoints, as it may publish another one in the meantime.
    """
    return _newest_intact(directory, on_first_rank(lambda: _resumable(latest_step(directory), saved_steps(directory))))


def last_intact(directory: Path) -> Path | None:
    """Return the last intact checkpoint of `directory` itself, None if there is none. Collective.

    Checkpoints later than the pointer are ignored. If the pointer is missing or damaged, as after a crash or an
    incomplete copy, the newest intact checkpoint counts.

    Raises:
        UserError: the ranks do not see the same steps.
    """
    latest = latest_step(directory)
    saved = sorted(saved_steps(directory))
    is_damaged = latest is None and os.path.lexists(directory / LATEST_FILE)
    agree({str(directory / LATEST_FILE): "damaged" if is_damaged else latest, f"{directory / STEP_PREFIX}*": saved})
    if is_damaged:
        _warn(f"{directory / LATEST_FILE} is damaged: the newest intact checkpoint there counts")
    steps = _resumable(latest, saved)
    if latest is not None and latest not in steps:
        _warn(f"{directory / LATEST_FILE} names step {latest}, which is missing: the newest checkpoint there counts")
    newer = [step for step in saved if step not in steps]
    if newer:
        names = ", ".join(f"{STEP_PREFIX}{step}" for step in newer)
        _warn(f"{directory / LATEST_FILE} names step {latest}: newer checkpoints are ignored: {names}")
    return _newest_intact(directory, steps)


def _resumable(latest: int | None, saved: Sequence[int]) -> list[int]:
    """Return the latest step and the saved steps before it, in order; all saved steps if `latest` is before all.

    A run's pointer names only a checkpoint that it has, so a pointer before all saved steps is damaged.
    """
    if latest is None or all(step > latest for step in saved):
        return sorted(saved)
    return sorted({latest, *(step for step in saved if step <= latest)})


def _newest_intact(directory: Path, steps: Sequence[int]) -> Path | None:
    """Return the last intact one of the directory's checkpoints of `steps`, which ascend."""
    for step in reversed(steps):
        checkpoint = directory / f"{STEP_PREFIX}{step}"
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint  # an earlier step than the pointer's after a crash that cut short a replacement
        logger.warning("%s is damaged and skipped: %s", checkpoint, damage)
    return None


def _lost(directory: Path) -> str | None:
    """Explain why `directory` once had checkpoints although none is intact; None if there is no sign of any."""
    latest = latest_step(directory)
    if latest is not None:
        return f"{directory / LATEST_FILE} names step {latest}, but no intact {STEP_PREFIX}{latest} or earlier exists"
    if saved_steps(directory) or os.path.lexists(directory / LATEST_FILE):
        return f"{directory} had checkpoints, but none of them is intact"
    return None


def _named(path: str, directory: Path) -> Path:
    if is_uri(path):
        try:
            return fetch(Remote(path), directory)
        except Exception as error:  # each file system has errors of its own
            raise UserError(f"trainer.resume_from_path: {error}") from error
    checkpoint = Path(path)
    if not os.path.lexists(checkpoint / STATE_FILE):  # is_file raises for names that are too long
        raise UserError(f"trainer.resume_from_path={path} is not a checkpoint: it has no {STATE_FILE}")
    damage = find_damage(checkpoint)
    if damage:
        raise UserError(f"trainer.resume_from_path={path} is damaged: {damage}; name another")
    return checkpoint


def _newer(mirror: Remote, directory: Path, than: int | None) -> Path | None:
    """Copy the last intact checkpoint of the mirror if it is newer than step `than`; return the copy.

    Raises:
        UserError: there is no local checkpoint (`than` is None), and the mirror or its checkpoints cannot be read.
    """
    try:
        steps = on_first_rank(mirror.resumable_steps)
    except Exception as error:  # each file system has errors of its own
        problem = str(error)
    else:
        problem = ""
        wanted = [step for step in steps if than is None or step > than]
        for step in reversed(wanted):
            try:
                fetched = fetch(mirror.checkpoint(step), directory)
            except Exception as error:
                problem = str(error)
                _warn(f"{STEP_PREFIX}{step} of the mirror is skipped: {problem}")
            else:
                on_first_rank(partial(_take_over, mirror, directory, step))
                return fetched
    if problem and than is None:
        raise UserError(
            f"{directory} has no intact checkpoint, and none can be fetched from the mirror {mirror}: {problem}; make "
            f"the mirror reachable, or {AFRESH}"
        )
    if problem:
        _warn(f"the mirror {mirror} may have a newer checkpoint than {STEP_PREFIX}{than}, which is used: {problem}")
    return None


def _take_over(mirror: Remote, directory: Path, step: int) -> None:
    """Make the run resume from a checkpoint of the mirror, with the metrics that were logged before it."""
    part = directory / f".{METRICS_FILE}.part"
    try:
        if mirror.has(METRICS_FILE):
            mirror.get(METRICS_FILE, part)
            part.replace(directory / METRICS_FILE)
    except Exception as error:
        part.unlink(missing_ok=True)
        _warn(f"{mirror}/{METRICS_FILE} cannot be fetched, so the metrics of earlier steps are missing: {error}")
    name_latest(directory, step)


def _warn(message: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", message)
