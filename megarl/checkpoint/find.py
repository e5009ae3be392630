"""Which checkpoint a run continues from: the last whole one of its directory, or the one that it is told."""

import logging
from pathlib import Path

from megarl.checkpoint.manifest import find_damage

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
PREFIX = "global_step_"


def find_checkpoint(directory: Path, *, mode: str, path: str | None) -> Path | None:
    """The checkpoint to continue from, None to start afresh. Collective: every file of it is looked at.

    Raises:
        ValueError: there is none at the `path` of mode resume_path or it is damaged, or none of those that the
            directory had is left whole.
    """
    if mode == "resume_path":
        checkpoint = Path(str(path))
        if not (checkpoint / "state.json").is_file():
            raise ValueError(f"trainer.resume_from_path={path} is no checkpoint: it has no state.json")
        if damage := find_damage(checkpoint):
            raise ValueError(f"trainer.resume_from_path={path} is damaged: {damage}; name another")
        return checkpoint
    latest = directory / LATEST
    if mode == "disable" or not latest.is_file():
        return None
    last = int(latest.read_text())
    for step in sorted((step for step in saved_steps(directory) if step <= last), reverse=True):
        checkpoint = directory / f"{PREFIX}{step}"
        if not (damage := find_damage(checkpoint)):
            return checkpoint  # an earlier one where a crash came while the last was being replaced
        logger.warning("%s is damaged and passed over: %s", checkpoint, damage)
    raise ValueError(
        f"{latest} says {last}, but there is no whole {PREFIX}{last} or earlier: bring it back, name another by "
        "trainer.resume_mode=resume_path, or start afresh with trainer.resume_mode=disable"
    )


def saved_steps(directory: Path) -> list[int]:
    """The steps of which `directory` has a checkpoint."""
    names = [path.parent.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*/state.json")]
    return [int(name) for name in names if name.isdecimal()]
