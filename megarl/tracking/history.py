"""`history.jsonl` in the run's directory: a line when a process begins or ends its part of a run."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from getpass import getuser
from pathlib import Path

from megarl.platform.secrets import redact
from megarl.platform.terminal import COMMAND, typed
from megarl.platform.versions import versions
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.lines import Lines
from megarl.tracking.names import Ending
from megarl.tracking.protocol import NullTracker, Row

HISTORY_FILE = "history.jsonl"
GIT_S = 5  # most seconds that git may take


class History(NullTracker):
    """A tracker that notes command, code, user and host of each start, and how that part of the run ended.

    A new run replaces the file, and a resumed run adds to it. A start that finds no steps left is not noted.
    """

    def __init__(self, run_dir: Path, *, resume_step: int | None = None) -> None:
        self._lines = Lines(run_dir / HISTORY_FILE)
        self._lines.cut(None if resume_step is None else sys.maxsize)
        self._step = resume_step or 0
        path = run_dir / HISTORY_FILE
        rows = read_jsonl(path) if path.exists() else []
        self._is_over = [(row.get("event"), row["step"]) for row in rows[-1:]] == [("finished", resume_step)]
        if not self._is_over:
            self._begin()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Remember the step."""
        if self._is_over:
            self._is_over = False
            self._begin()
        self._step = step

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Note how this part of the run ended."""
        if not self._is_over:
            self._note({"event": ending})
        self._lines.close()

    def _begin(self) -> None:
        self._note({"event": "resume" if self._step else "start", "versions": versions(), **origin()})

    def _note(self, event: Mapping[str, object]) -> None:
        self._lines.append([{"step": self._step, "time": time.time(), **event}])


def origin() -> dict[str, str]:
    """Return the command, user and host of this process, and the commit of the working directory if git knows one."""
    facts = {"command": redact(os.environ.get(COMMAND) or typed()), "host": socket.gethostname()}
    try:
        facts["user"] = getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        facts["user"] = str(os.getuid())
    commit = _commit()
    return facts | ({"commit": commit} if commit else {})


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        found = subprocess.run(
            [git, "rev-parse", "--verify", "HEAD"], capture_output=True, encoding="utf-8", timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
