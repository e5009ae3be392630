"""The end of a forked process: what `atexit` holds is done, what was imported is not unloaded."""

import atexit
import os
from pathlib import Path

from megarl.platform.forking import end, fork


class Unloaded:
    """Creates a file when the interpreter deletes its last instance."""

    def __init__(self, file: Path) -> None:
        self._touch = file.touch

    def __del__(self) -> None:
        self._touch()


def test_process_end_runs_atexit_functions_and_unloads_nothing(tmp_path: Path) -> None:
    if (pid := fork()) == 0:
        atexit._clear()  # what pytest and its plug-ins registered is theirs to do
        atexit.register((tmp_path / "done").touch)
        globals()["kept"] = Unloaded(tmp_path / "unloaded")
        end()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["done"]
