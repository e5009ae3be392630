"""The traffic and the memory of a rank: bytes that it sends point to point, and how far its memory rises."""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megarl.distributed.exchange import REDUCED

DRAWN_BYTES = 13  # of a token as an engine draws it: the token, its log-probability and version, and the mask
CROSSING_BYTES = DRAWN_BYTES - 4  # of a token that travels: in a synchronous step all have the same version


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes and the messages of samples that this process sends within the block."""
    found = Counter[str]()
    send = dist.isend

    def isend(tensor: torch.Tensor, rank: int, *, tag: int = 0, **settings: Any) -> Any:
        if tag != REDUCED:
            found["bytes"] += tensor.nbytes
            found["messages"] += 1
        return send(tensor, rank, tag=tag, **settings)

    with patch.object(dist, "isend", isend):
        yield found


@contextmanager
def peak() -> Iterator[dict[str, int]]:
    """Measure how far the resident memory of this process rises within the block."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier steps have freed counts when it is used again
    before = begin_peak()
    found = dict[str, int]()
    yield found
    found["bytes"] = peak_of() - before


def begin_peak(process: int | str = "self") -> int:
    """Let the peak of a process begin anew, and return the bytes that it has."""
    Path(f"/proc/{process}/clear_refs").write_text("5")  # proc(5)
    return _resident("VmRSS", process)


def peak_of(process: int | str = "self") -> int:
    """Return the most bytes that a process has had since its peak began."""
    return _resident("VmHWM", process)


def _resident(name: str, process: int | str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) << 10
