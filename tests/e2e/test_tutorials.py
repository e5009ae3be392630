"""The tutorials run as they are written."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, SHOWN_CHARACTERS

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = ROOT / "docs" / "tutorials.md"
TIMEOUT_S = 840  # for busy machines


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)  # the shell is the first process of a group with all its commands
            shell.wait()
    printed = log.read_text()
    assert shell.returncode == 0, printed[-SHOWN_CHARACTERS:]
    assert "It fits:" in printed
    for made in re.findall(r"`(runs/tutorial/[\w./]+)`", PAGE.read_text()):
        assert (tmp_path / made).exists(), made
