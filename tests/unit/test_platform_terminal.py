"""Output to a closed pipe, a lost terminal and a full device: the process continues."""

import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
PROGRAM = """
import logging, sys
from megarl.platform.terminal import ignore_broken_pipe
from megarl.tracking.console import Console

before = sys.stdout
ignore_broken_pipe()
ignore_broken_pipe()
sys.stdout = before  # the discarded stream closes nothing
ignore_broken_pipe()
sys.stdin.readline()
console = Console(total_steps=300)
for step in range(1, 301):
    console.log({"critic/score/mean": 0.5}, step=step)
    print("plain", "x" * 100)
    logging.warning("said")
console.log_table("t", [{"text": "a"}], step=300)
console.close([{"a": 1}])
open(sys.argv[1], "w").write("to the end")
"""


def started(out: int, done: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", PROGRAM, str(done)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)


def ends_well(process: "subprocess.Popen[bytes]", done: Path) -> None:
    process.communicate(b"\n")
    assert process.returncode == 0
    assert done.read_text() == "to the end"


def test_process_survives_closed_output_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = started(writer, tmp_path / "done")
    os.close(writer)
    os.close(reader)
    ends_well(process, tmp_path / "done")


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = started(theirs, tmp_path / "done")
    os.close(theirs)
    os.close(ours)
    ends_well(process, tmp_path / "done")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_log_file_on_a_full_disk(tmp_path: Path) -> None:
    with FULL.open("wb") as full:
        process = started(full.fileno(), tmp_path / "done")
    ends_well(process, tmp_path / "done")


def test_output_that_was_closed_before_the_start(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", PROGRAM, str(tmp_path / "done")]
    ends_well(subprocess.Popen(command, stdin=subprocess.PIPE), tmp_path / "done")


def test_what_is_read_arrives(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = started(log.fileno(), tmp_path / "done")
    ends_well(process, tmp_path / "done")
    text = (tmp_path / "log").read_text()
    assert "step 300/300  reward 0.500" in text
    assert text.count("plain") == 300
    assert text.count("WARNING:root:said") == 300


def test_an_output_of_ones_own_stays_open() -> None:
    program = """
import os, sys
from megarl.platform.terminal import ignore_broken_pipe

sys.stdout = os.fdopen(os.dup(1), "w")  # nothing else holds it
ignore_broken_pipe()
print("said", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


@pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET"), reason="no socket that keeps writes apart")
@pytest.mark.parametrize(
    "statement",
    [
        "print_message('first\\nlast')",
        "print_error(ValueError('first\\nlast'))",
        "raise ValueError('first\\nlast')",
        "thread = Thread(target=int, args=['first\\nlast']); thread.start(); thread.join()",
    ],
)
def test_no_process_writes_into_another_ones_message(statement: str) -> None:
    program = f"""
from threading import Thread

from megarl.commands.cli.command import print_error
from megarl.platform.secrets import guard_output
from megarl.platform.terminal import print_message

guard_output()
{statement}
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each write is received as it was made
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], stderr=theirs.fileno(), check=False)
        theirs.close()
        writes = [written.decode() for written in iter(lambda: ours.recv(1 << 20), b"")]
    assert len(writes) == 1, writes
    assert "first" in writes[0]
    assert writes[0].endswith("\n")
