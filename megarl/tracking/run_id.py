"""The files of a run's directory with the ids of its runs in MLflow and Weights & Biases."""

import logging
import os
import re
from pathlib import Path

from megarl.platform.small_files import Damage, read_text

logger = logging.getLogger(__name__)

RUN_ID_FILE, WANDB_RUN_ID_FILE = RUN_ID_FILES = ("mlflow_run_id", "wandb_run_id")
MAX_BYTES = 1 << 10


def read_run_id(path: Path) -> str | None:
    """Return the id in a file; None if the file is missing or empty.

    Raises:
        Damage: the file cannot be read, or has something that cannot be an id.
    """
    if not os.path.lexists(path):
        return None
    run_id = read_text(path, max_bytes=MAX_BYTES).strip()
    if not re.fullmatch(r"[\w .-]*", run_id):
        raise Damage.in_content(path, "its content is no id of a run")
    return run_id or None


def known_run_id(path: Path) -> str | None:
    """Return the id as `read_run_id` does, but warn and return None if the file is damaged: a new run begins then."""
    try:
        return read_run_id(path)
    except Damage as damage:
        logger.warning("%s; it counts as missing", damage)
        return None


def known_run_ids(directory: Path) -> dict[str, str]:
    """Return the ids in a directory, by the names of their files, without missing or damaged ones."""
    found = {name: known_run_id(directory / name) for name in RUN_ID_FILES}
    return {name: run_id for name, run_id in found.items() if run_id}
