"""What a run's directory holds of checkpoints: their names, and how one that is whole gets its own.

RUN_DIR/global_step_40/                     whole
        .global_step_40.part/               being written, fetched or removed; left behind by a crash
        latest_checkpointed_iteration.txt   the step to continue from, or an earlier one where that is damaged
        set_aside-20260131-235959/          checkpoints, and the pointer, of a past that the run has left
"""

import re
import shutil
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from megarl.platform.files import explained, sync_directory, write_whole
from megarl.platform.small_files import Damage, read_bytes

LATEST_FILE = "latest_checkpointed_iteration.txt"
STEP_PREFIX = "global_step_"


def saved_steps(directory: Path) -> list[int]:
    """List the steps of which `directory` has a checkpoint, intact or not: no link to one, no copy of another name."""
    found = {path: step_of_name(path.name) for path in directory.glob(f"{STEP_PREFIX}*")}
    return [step for path, step in found.items() if step is not None and not path.is_symlink() and path.is_dir()]


def step_of_name(name: str) -> int | None:
    """Return the step of the checkpoint that is called `name`; None if no checkpoint is called so."""
    return parse_step(number.encode()) if (number := name.removeprefix(STEP_PREFIX)) != name else None


def parse_step(text: bytes) -> int | None:
    """Return the step that a text is, in decimal digits and as a run writes it; None if it is none."""
    return int(text) if re.fullmatch(rb"0|[1-9][0-9]{0,17}", text) else None


def step_in(directory: Path, checkpoint: Path) -> int | None:
    """The step of a checkpoint of `directory`, by whatever path it is named; None for one that lies elsewhere."""
    place = checkpoint.resolve()
    return next(
        (step for step in saved_steps(directory) if (directory / f"{STEP_PREFIX}{step}").resolve() == place), None
    )


def publish(part: Path, final: Path) -> None:
    """Give a whole checkpoint its name, in place of one that has it already."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():  # a run that was sent back before this step
        final.rename(old)
    part.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(directory: Path, step: int) -> None:
    """Remove a checkpoint, which from the first moment is none, even if the process dies meanwhile. Raises OSError."""
    final = directory / f"{STEP_PREFIX}{step}"
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    final.rename(part)
    shutil.rmtree(part)


def set_aside(directory: Path, steps: Collection[int], *, latest: int | None) -> Path | None:
    """Move the checkpoints of `steps` to a directory of their own, which is returned; None: there was nothing to move.

    The run continues from the checkpoint of `latest` then; where that is None, the pointer is set aside too.

    Raises:
        WriteError: they cannot be moved.
    """
    target = directory / f"set_aside-{datetime.now():%Y%m%d-%H%M%S}"
    with explained(str(target)):
        if latest is not None:  # first, so that a crash amid it does not bring back what is being set aside
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
    """Have the run continue from the checkpoint of `step`."""
    write_whole(directory / LATEST_FILE, str(step).encode())


def latest_step(directory: Path) -> int | None:
    """Return the step to continue from if that checkpoint is intact; None if no readable file says it."""
    try:
        return parse_step(read_bytes(directory / LATEST_FILE).strip())
    except Damage:
        return None
