"""The tutorials, and the page of a new project, run as they are written."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.commands.new.__main__ import main as new
from megarl.report.read import read_run
from tests.support.programs import ROOT, SHOWN_CHARACTERS
from tests.support.workspace import SMALL, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = ROOT / "docs" / "tutorials.md"
TIMEOUT_S = 840  # for busy machines


def run_page(page: Path, directory: Path, **replaced: str) -> str:
    """Run the commands of a page in a directory, some words replaced; return all that they print."""
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    for words, others in replaced.items():
        commands = commands.replace(words, others)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = directory / "log.txt"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", commands],
            cwd=directory,
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
    return printed


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert "It fits:" in run_page(PAGE, tmp_path)
    for made in re.findall(r"`(runs/tutorial/[\w./]+)`", PAGE.read_text()):
        assert (tmp_path / made).exists(), made


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_tiny_project_learns_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    project = tmp_path / "boxes"
    assert new([str(project), "--tiny"]) == 0
    printed = run_page(project / "README.md", project)
    assert "step 20/20" in printed
    run = read_run(project / "run")
    scores = dict(run.points("critic/score/mean"))
    assert sum(scores[step] for step in range(18, 21)) > sum(scores[step] for step in range(1, 4))
    validations = dict(run.points("val/test_score/own"))
    assert validations[20] > validations[0]
    assert (project / "out/model.safetensors").exists()


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_new_project_trains_and_exports(workspace: Workspace, tmp_path: Path) -> None:
    project = tmp_path / "mine"
    assert new([str(project), "--model", str(workspace.model)]) == 0
    printed = run_page(project / "README.md", project, **{"config.yaml": f"config.yaml {' '.join(SMALL)}"})
    assert "step 2/2" in printed
    assert "README.md describes the model" in printed
    for made in ("run/global_step_2", "run/report.html", "mlflow.db", "out/model.safetensors", "out/README.md"):
        assert (project / made).exists(), made
