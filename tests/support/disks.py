"""Disks that are really full or read-only, for tests that may mount file systems."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A small file system in memory at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, *, leave: int = 0) -> None:
        """Leave room for `leave` bytes, rounded down to pages."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                os.truncate(self._ballast, max(0, self._ballast.stat().st_size - leave))

    def clear(self) -> None:
        """Make room again."""
        self._ballast.unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Refuse writes inside the context."""
        subprocess.run(["mount", "-o", "remount,ro", self.path], check=True)
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", self.path], check=True)


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Disk]:
    """Mount a file system of `num_bytes` at the new directory `path`; skip the test if that is not permitted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "megarl-test", path]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount on this machine")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
