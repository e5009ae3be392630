"""Programs that cannot begin to work end with a message."""

import sys
from pathlib import Path

from tests.support.programs import run_program


def test_deleted_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = 'cd "$0" && rmdir "$0" && exec "$1" -m megarl train run.yaml'
    code, printed = run_program("sh", "-c", shell, tmp_path / "gone", sys.executable, timeout_s=60)
    assert code == 1
    assert printed == (
        "megarl: the working directory cannot be used (No such file or directory): change to another directory\n"
    )
