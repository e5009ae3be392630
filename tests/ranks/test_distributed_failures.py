"""A rank that fails leaves its traceback in the directory of the run, and the last line names the rank and the file."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launchers import NEEDS_MPIRUN, start

pytestmark = pytest.mark.ranks
MODULE = ["-m", "tests.support.failing"]
PLAIN = [sys.executable, *MODULE]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *MODULE]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *MODULE]
BUGS = {
    "zip": ("unequal_zip", "ValueError: zip() argument 2 is shorter than argument 1"),
    "unpacking": ("unpacking", "ValueError: too many values to unpack (expected 1)"),
    "torch": ("torch_value_error", "ValueError: Expected parameter probs"),
}


def run(command: list[str], directory: Path, kind: str) -> tuple[int, str]:
    """Return the exit code and what the job prints to standard error."""
    process: subprocess.Popen[str] = start(command, str(directory), kind)
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


@pytest.mark.parametrize("kind", BUGS)
def test_bug_shows_traceback_and_names_its_file_last(tmp_path: Path, kind: str) -> None:
    code, errors = run(PLAIN, tmp_path, kind)
    function, message = BUGS[kind]
    file = tmp_path / "errors" / "rank_1.txt"
    assert code == 1
    for text in (errors, file.read_text(encoding="utf-8")):
        assert "failing.py" in text
        assert f"in {function}\n" in text
        assert message in text
    assert errors.rstrip().splitlines()[-1] == f"megarl: rank 1 failed first; its traceback is in {file}"
    assert errors.count("Traceback (most recent call last):") == 1, "other ranks fail because this rank does"


def test_last_line_shows_what_terminals_obey(tmp_path: Path) -> None:
    directory = tmp_path / "a\u202e\x1b[31m\nb"
    directory.mkdir()
    _, errors = run(PLAIN, directory, "zip")
    file = rf"{tmp_path}/a\u202e\x1b[31m\nb/errors/rank_1.txt"
    assert errors.rstrip().splitlines()[-1] == f"megarl: rank 1 failed first; its traceback is in {file}"


@pytest.mark.parametrize("command", [TORCHRUN, pytest.param(MPIRUN, marks=NEEDS_MPIRUN)], ids=["torchrun", "mpirun"])
def test_other_launchers_name_the_file_too(tmp_path: Path, command: list[str]) -> None:
    code, errors = run(command, tmp_path, "zip")
    file = tmp_path / "errors" / "rank_1.txt"
    assert code != 0
    assert "in unequal_zip\n" in errors
    assert f"megarl: rank 1 failed first; its traceback is in {file}" in errors
    if command is TORCHRUN:
        assert f"traceback : megarl: rank 1 failed first; its traceback is in {file}" in errors.split("Root Cause")[1]
    assert "in unequal_zip\n" in file.read_text(encoding="utf-8")


def test_user_error_is_one_line_and_keeps_traceback(tmp_path: Path) -> None:
    code, errors = run(PLAIN, tmp_path, "user")
    assert code == 1
    assert "megarl: rank 1: trainer.n_gpus_per_node=3: write 2\n" in errors
    assert "Traceback" not in errors
    assert "in user_error\n" in (tmp_path / "errors" / "rank_1.txt").read_text(encoding="utf-8")
