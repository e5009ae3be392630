"""The tutorials run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs" / "tutorials.md"


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": python, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "It fits:" in done.stdout
    for path in re.findall(r"`(runs/tutorial/[\w./]+)`", PAGE.read_text()):
        assert (tmp_path / path).exists(), path
