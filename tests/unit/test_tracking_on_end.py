"""The command that runs when a run ends: what it learns, and what its own failure costs."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.tracking import on_end
from megarl.tracking.on_end import EndCommand

NOTE = 'echo "$MEGARL_ENDING" > "$MEGARL_RUN_DIR/ending"'


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_command_learns_how_the_run_ended(ending: str, tmp_path: Path) -> None:
    with EndCommand(NOTE, tmp_path) as at_end:
        assert not (tmp_path / "ending").exists()
        at_end.ending = ending  # type: ignore[assignment]
    assert (tmp_path / "ending").read_text() == f"{ending}\n"


def test_command_runs_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), EndCommand(NOTE, tmp_path):
        sys.exit(1)
    assert (tmp_path / "ending").read_text() == "failed\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_command_runs_after_a_kill(number: int, tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from megarl.tracking.on_end import EndCommand

with EndCommand({NOTE + "; echo ended"!r}, Path({str(tmp_path)!r})):
    os.killpg(0, {int(number)})
    os._exit(9)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.communicate()[0] == b"ended\n"  # the command's own end closes the output
    expected = "failed\n" if number == signal.SIGINT else "killed\n"
    assert (tmp_path / "ending").read_text() == expected


def test_failing_command_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), EndCommand("exit 3", tmp_path):
        pass
    assert caplog.messages == ["trainer.on_end failed: its exit code is 3"]


def test_slow_command_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_end, "WAIT_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with caplog.at_level(logging.WARNING), EndCommand(f"cat '{tmp_path}/pipe'; {NOTE}", tmp_path):
        pass
    assert "trainer.on_end runs on" in caplog.text
    assert not (tmp_path / "ending").exists()
    (tmp_path / "pipe").write_text("")  # now the command ends
