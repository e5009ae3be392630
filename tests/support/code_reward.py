"""A custom reward that runs the response as code, and the state that a response could leave behind for the next one."""

import atexit
import builtins
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

WORDS = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)  # open as long as the process
os.pwrite(WORDS, b"0123456789", 0)
RANDOM = random.Random(7)  # noqa: S311 - a state that a response could change
DEFAULTS: list[int] = []
exits: list[str] = []
atexit.register(exits.append, "over")
original = json.dumps


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    """Run the response, and score what it leaves in `result`; every other number shows a part of the state."""
    scope: dict[str, Any] = {"compute_score": compute_score, "module": sys.modules[__name__]}
    state = state_of_process()
    exec(solution_str, scope)  # noqa: S102 - that is the subject
    return {"score": float(scope.get("result") == ground_truth), **state}


def state_of_process() -> dict[str, float]:
    """Return numbers that differ if an earlier response changed something here."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "builtins": float(len(vars(builtins))),
        "length": float(len([1, 2, 3])),
        "modules": float("evil" in sys.modules),
        "json": float(json.dumps is original),
        "path": float(len(sys.path)),
        "recursion": float(sys.getrecursionlimit()),
        "random": RANDOM.random(),
        "defaults": float(len(DEFAULTS)),
        "environment": float("EVIL" in os.environ),
        "directory": float(Path.cwd() == Path("/")),
        "mask": float(mask),
        "alarm": float(signal.getsignal(signal.SIGALRM) is signal.SIG_DFL),
        "threads": float(threading.active_count()),
        "files": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "read": float(os.read(WORDS, 1) or b"-1"),
        "hook": float(sys.gettrace() is None and sys.getprofile() is None),
    }
