"""`--detach`: the command runs on as it was typed, in a session of its own."""

import json
import sys
import time
from pathlib import Path

import pytest

from megarl.commands import entry
from megarl.distributed.place import Launch
from megarl.platform.detached import CONSOLE
from megarl.platform.errors import UserError
from tests.support.programs import succeed

PROGRAM = """
import json, os, sys
from pathlib import Path
from megarl.commands import entry

if entry.OPTION in sys.argv:
    entry._detach(sys.argv[1:], Path(sys.argv[1]), None)
else:
    print(json.dumps([sys.orig_argv[1:], os.getsid(0) == os.getpid(), sys.stdin.read()]))
"""


def test_command_is_repeated_in_another_session(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("-X", "utf8", "program.py", "run", "--detach", "a.b=c d")
    printed = succeed(sys.executable, *words, timeout_s=60, cwd=tmp_path)
    assert "megarl watch run" in printed and "kill " in printed
    console = tmp_path / "run" / CONSOLE
    while not console.read_text().endswith("\n"):
        time.sleep(0.05)
    assert json.loads(console.read_text()) == [[word for word in words if word != "--detach"], True, ""]


def test_launcher_keeps_its_ranks(tmp_path: Path) -> None:
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=2)
    with pytest.raises(UserError, match="leave it out under torchrun"):
        entry._detach(["--detach"], tmp_path, launch)
    assert not (tmp_path / CONSOLE).exists()
