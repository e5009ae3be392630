"""A file system on this machine's disk that fails as a test asks: `faulty:///path`."""

from collections import Counter
from threading import Event
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyFileSystem(LocalFileSystem):
    """fsspec's local file system; `arm` says what fails from then on."""

    protocol = "faulty"
    cachable = False
    faults: Counter[str] = Counter()  # end of a path -> how often it still cannot be written
    shortened: Counter[str] = Counter()  # end of a path -> how often it still is said to be smaller than it is
    undeletable = False
    written: list[str] = []  # what was written, in order
    gate = Event()  # while it is closed, writers wait

    @classmethod
    def arm(cls, *, faults: dict[str, int] | None = None, shortened: dict[str, int] | None = None) -> None:
        """Forget earlier faults, and plant these."""
        cls.faults, cls.shortened = Counter(faults), Counter(shortened)
        cls.undeletable, cls.written = False, []
        cls.gate.set()

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "wb":
            self.gate.wait()
            if _count(self.faults, path):
                raise OSError(f"no connection while {path} is written")
            self.written.append(path)
        return super()._open(path, mode, **kwargs)

    def info(self, path: Any, **kwargs: Any) -> Any:
        found = super().info(path, **kwargs)
        if found["type"] == "file" and _count(self.shortened, found["name"]):
            found["size"] -= 1
        return found

    def rm(self, *args: Any, **kwargs: Any) -> None:
        if self.undeletable:
            raise PermissionError("not allowed to delete")
        super().rm(*args, **kwargs)


def _count(remaining: Counter[str], path: str) -> bool:
    for end, times in remaining.items():
        if path.endswith(end) and times > 0:
            remaining[end] -= 1
            return True
    return False


fsspec.register_implementation(FaultyFileSystem.protocol, FaultyFileSystem, clobber=True)
