"""Descendants end whatever their names are."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import subprocess, sys
from megarl.platform.processes import adopt_orphans, descendants, end_descendants

adopt_orphans()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
assert len(list(descendants())) == 2
print(end_descendants(within_s=20.0), list(descendants()))
"""
PARENT = """
import subprocess, sys
name = "ctypes.CDLL(None).prctl(15, bytes([0xC3, 0x28, 0xFF]))"
code = f"import ctypes, time; {name}; print(1, flush=True); time.sleep(9)"
subprocess.run([sys.executable, "-c", code])
"""


def test_process_name_may_be_no_text() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, PARENT],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "True []\n", done.stderr
