"""The checkpoints in a run's directory: their names, and the atomic rename that publishes a complete one.

RUN_DIR/global_step_40/                     complete
        .global_step_40.part/               being written, fetched or removed; may remain after a crash
        latest_checkpointed_iteration.txt   the pointer: the step to resume from; an earlier step if that is damaged
        set_aside-20260131-235959-012345/   checkpoints, and the pointer, that the run does not continue
        .lock                               host and process of the job that has the directory, locked while it lives
"""

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megarl.platform.files import explained, sync_directory, write_whole
from megarl.platform.small_files import Damage, read_bytes

CONFIG_FILE = "config.yaml"
"""The configuration of a run, in its directory and in each checkpoint."""
HUGGINGFACE = "huggingface"
"""The exported model, in the directory of a supervised run and in each checkpoint."""
LATEST_FILE = "latest_checkpointed_iteration.txt"
MANIFEST_FILE = "manifest.json"
"""Size and checksum of every file, in each complete checkpoint."""
STATE_FILE = "state.json"
"""The state of the run except its models, in each checkpoint."""
STEP_PREFIX = "global_step_"
LOCK = ".lock"


def job_in(directory: Path) -> str | None:
    """Return process and host of the job that has a run's directory; None if no job has, or files cannot be locked."""
    try:
        with (directory / LOCK).open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read() or "an unknown process"
    except OSError:
        return None
    return None


def process_in(directory: Path) -> int | None:
    """Return this user's process on this machine that has a run's directory; None if there is no such process."""
    found = re.match(r"process (\d+) ", job_in(directory) or "")
    if not found:
        return None
    with suppress(OSError):
        lock = (directory / LOCK).stat()
        if any(
            os.path.samestat(file.stat(), lock) for file in Path("/proc", found[1], "fd").iterdir() if file.exists()
        ):
            return int(found[1])
    return None


def saved_steps(directory: Path) -> list[int]:
    """List the steps of the checkpoints in `directory`, intact or not, without links and without renamed copies."""
    found = {path: step_of_name(path.name) for path in directory.glob(f"{STEP_PREFIX}*")}
    return [step for path, step in found.items() if step is not None and not path.is_symlink() and path.is_dir()]


def step_of_name(name: str) -> int | None:
    """Return the step of the checkpoint `name`; None if this is not the name of a checkpoint."""
    number = name.removeprefix(STEP_PREFIX)
    return None if number == name else parse_step(number.encode(errors="replace"))  # it may not be UTF-8


def parse_step(text: bytes) -> int | None:
    """Parse a step as a run writes it, in decimal digits; return None for any other text."""
    return int(text) if re.fullmatch(rb"0|[1-9][0-9]{0,17}", text) else None


def step_in(directory: Path, checkpoint: Path) -> int | None:
    """Return the step of a checkpoint of `directory`, given by any path; None if it is in another directory."""
    place = checkpoint.resolve()
    return next(
        (step for step in saved_steps(directory) if (directory / f"{STEP_PREFIX}{step}").resolve() == place), None
    )


def make_empty(part: Path, names: Iterable[str]) -> None:
    """Make the directory of an unfinished checkpoint afresh, with the directories `names` in it."""
    shutil.rmtree(part, ignore_errors=True)
    for name in names:
        (part / name).mkdir(parents=True, exist_ok=True)


def remove(directory: Path, step: int) -> None:
    """Remove a checkpoint; if the process dies meanwhile, the rest is not taken for a checkpoint. Raises OSError."""
    final = directory / f"{STEP_PREFIX}{step}"
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    final.rename(part)
    shutil.rmtree(part)


def set_aside(directory: Path, steps: Collection[int], *, latest: int | None) -> Path | None:
    """Move the checkpoints of `steps` to a new directory and return it; None if there is nothing to move.

    The run then resumes from the checkpoint of `latest`; if that is None, the pointer is moved too.

    Raises:
        WriteError: a file cannot be moved.
    """
    target = directory / f"set_aside-{datetime.now():%Y%m%d-%H%M%S-%f}"
    with explained(str(target)):
        if latest is not None:  # first, so that a crash in between does not bring back what is being moved
            name_latest(directory, latest)
        names = [f"{STEP_PREFIX}{step}" for step in sorted(steps, reverse=True)]
        names += [LATEST_FILE] if latest is None and (directory / LATEST_FILE).exists() else []
        if not names:
            return None
        target.mkdir()
        for name in names:
            (directory / name).rename(target / name)
        sync_directory(directory)
    return target


def name_latest(directory: Path, step: int) -> None:
    """Make the run resume from the checkpoint of `step`."""
    write_whole(directory / LATEST_FILE, str(step).encode())


def latest_step(directory: Path) -> int | None:
    """Return the step of the pointer; None if the pointer is missing or damaged."""
    try:
        return parse_step(read_bytes(directory / LATEST_FILE).strip())
    except Damage:
        return None
