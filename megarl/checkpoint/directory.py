"""What a run's directory holds of checkpoints: their names, and how one that is whole gets its own.

RUN_DIR/global_step_40/                     whole
        .global_step_40.part/               being written, or fetched; left behind by a crash
        latest_checkpointed_iteration.txt   the step to continue from, or an earlier one where that is damaged
"""

import shutil
from pathlib import Path

from megarl.platform.files import sync_directory, write_whole

LATEST = "latest_checkpointed_iteration.txt"
PREFIX = "global_step_"


def saved_steps(directory: Path) -> list[int]:
    """The steps of which `directory` has a checkpoint."""
    names = [path.parent.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*/state.json")]
    return [int(name) for name in names if name.isdecimal()]


def publish(part: Path, final: Path) -> None:
    """Give a whole checkpoint its name, in place of one that has it already."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():  # a run that was sent back before this step
        final.rename(old)
    part.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def name_latest(directory: Path, step: int) -> None:
    """Have the run continue from the checkpoint of `step`."""
    write_whole(directory / LATEST, str(step).encode())


def latest_step(directory: Path) -> int | None:
    """The step that the run would continue from if that checkpoint is whole; None where there is none."""
    latest = directory / LATEST
    return int(latest.read_text()) if latest.is_file() else None
