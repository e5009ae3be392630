"""Graphs of CUDA: work that is captured is not done at once, and is done each time when the graph is launched."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]  # reads and writes memory at fixed addresses
NCCL = ctypes.CDLL("libnccl.so.2")
_captured: list[Work] | None = None  # by the graph that is being captured


def is_capturing() -> bool:
    """Return whether a graph captures the current stream of this thread."""
    return _captured is not None and torch.cuda.is_current_stream_capturing()


def do(work: Work) -> None:
    """Do some work, or keep it for the graph that is being captured."""
    if _captured is not None and is_capturing():
        _captured.append(work)
    else:
        work()


def refuse(what: str) -> None:
    """Raise an error while a graph is captured: the host needs the result of an operation at once."""
    if is_capturing():
        raise RuntimeError(f"{what} cannot be captured in a graph")


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def keep_collectives(captured: int) -> None:
    """Keep collectives of NCCL, which ask for this while a graph is captured."""
    collectives = ctypes.c_void_p(captured)

    def work() -> None:
        status = NCCL.hollow_launch_collectives(collectives)
        assert status == 0, f"a captured collective has failed with code {status}"

    assert _captured is not None
    _captured.append(work)  # NCCL has streams of its own


def keep_captured_work() -> None:
    """Let the graphs of torch keep the work that they capture, and do it when they are launched."""
    graph = torch.cuda.CUDAGraph
    begin, end, launch = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global _captured
        assert _captured is None, "a graph is captured within another"
        begin(self, *args, **kwargs)
        _captured = self.hollow_work = []
        NCCL.hollow_capture_collectives(keep_collectives)

    def capture_end(self: Any) -> None:
        global _captured
        _captured = None
        NCCL.hollow_capture_collectives(None)
        end(self)

    def replay(self: Any) -> None:
        launch(self)
        for work in self.hollow_work:
            work()

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay  # type: ignore[method-assign]
