"""A user's command that runs when a run ends, for example to send a message."""

import logging
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.tracking.names import Ending

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""Seconds in which the command ends before the run no longer waits for it."""
_SCRIPT = 'read -r MEGARL_ENDING || MEGARL_ENDING=killed; export MEGARL_ENDING; eval "$MEGARL_ON_END"'


class EndCommand:
    """A shell that waits for the end of this process, and then runs a command. Without a command it does nothing.

    The command finds the run's directory in MEGARL_RUN_DIR, and how the run ended in MEGARL_ENDING: finished, stopped
    (by a signal; its last step is saved), failed (by an error), or killed (without a last word of this process: by a
    second signal, by the system, or after a hang). The shell reads the last word from a pipe, so that it also learns
    that this process was killed.
    """

    def __init__(self, command: str | None, run_dir: Path) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self.ending: Ending = "finished"
        if command:
            facts = {"MEGARL_ON_END": command, "MEGARL_RUN_DIR": str(run_dir.absolute())}
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT],
                stdin=subprocess.PIPE,
                env=os.environ | facts,
                start_new_session=True,  # a signal to the job is none to the command
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Run the command, and wait at most WAIT_S seconds for its end."""
        if self._shell is None:
            return
        ending = "failed" if error else self.ending
        try:
            self._shell.communicate(f"{ending}\n".encode(), WAIT_S)
        except subprocess.TimeoutExpired:
            logger.warning("trainer.on_end runs on: it did not end within %d s", WAIT_S)
        else:
            if self._shell.returncode:
                logger.warning("trainer.on_end failed: its exit code is %d", self._shell.returncode)
