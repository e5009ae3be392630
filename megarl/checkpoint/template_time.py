"""The file with the time that chat templates see, in the directory of a run and in its checkpoints."""

from datetime import datetime
from pathlib import Path

from megarl.platform.files import write_whole
from megarl.platform.small_files import Damage, read_text

TIME_FILE = "template_time"
MAX_BYTES = 1 << 10


def record_time(directory: Path, time: datetime) -> None:
    """Write the file."""
    write_whole(directory / TIME_FILE, time.isoformat().encode())


def recorded_time(directory: Path) -> datetime | None:
    """Return the time that the file holds; None if there is no file.

    Raises:
        Damage: the file cannot be read, or holds no time.
    """
    path = directory / TIME_FILE
    if not path.exists():
        return None
    text = read_text(path, max_bytes=MAX_BYTES)
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise Damage.in_content(path, f"it holds no time: {error}") from error
