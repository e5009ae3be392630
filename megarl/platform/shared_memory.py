"""Shared memory: its size, and what crashed jobs have left in it."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.platform.finding import Finding

MIN_SHM_GIB = 1
# Names under /dev/shm: of megarl, vLLM's CPU communicator, its caches, and Python's multiprocessing, which vLLM uses.
SEGMENT = re.compile(r"^megarl-.*(?<!\.lock)(?<!-sockets)$|cpushm|^vllm|^psm_")


def shared_memory_findings(directory: Path, maps: Sequence[str]) -> Iterator[Finding]:
    """Check the size of /dev/shm, and find segments of crashed jobs: this user's segments without a live process.

    Args:
        directory: /dev/shm.
        maps: the text of /proc/PID/maps of each live process.
    """
    if not directory.is_dir():
        return
    gib = shutil.disk_usage(directory).total / 2**30
    if gib < MIN_SHM_GIB:
        advice = "ranks share tensors there: docker run --shm-size=8g"
        yield Finding("shared memory", f"{gib:.2f} GiB", advice, "note")
    else:
        yield Finding("shared memory", f"{gib:.1f} GiB")
    used = {name for text in maps for name in re.findall(rf"{re.escape(str(directory))}/(.*)$", text, re.MULTILINE)}
    left = sorted(
        path for path in directory.iterdir() if SEGMENT.search(path.name) and path.name not in used and _is_own(path)
    )
    if left:
        removing = shlex.join(["rm", "--", *map(str, left)])
        found = f"{len(left)} segments"
        yield Finding("left by crashed jobs", found, "remove them with the command below", "note", removing)


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # its job ends now
        return False


def maps_of_live_processes() -> list[str]:
    """Return the text of /proc/PID/maps of each live process that this user may read."""
    texts = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            texts.append(maps.read_text(errors="replace", encoding="utf-8"))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return texts
