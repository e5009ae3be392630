"""Watching a run from its files: the curves, the headline, and the command itself."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.platform import progress
from megarl.commands.watch import headline, main, sparkline
from megarl.report.read import read_mapping, read_run
from megarl.tracking import status
from megarl.tracking.status import STATUS_FILE, Status
from tests.support.runs import PROMPTS, write_run


def test_a_curve_in_one_line() -> None:
    assert sparkline([(1, 0.0), (2, 1.0), (3, 7.0)]) == "▁▂█"
    assert sparkline([(1, 0.0), (2, 2.0), (3, 8.0), (4, 8.0)], width=2) == "▁█"  # means 1 and 8
    assert sparkline([(1, 3.0), (2, 3.0)]) == "▅▅"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"state": "running", "phase": "generating", "time": 95.0}, "step 4/9  generating"),
        ({"state": "running", "phase": "generating", "time": 40.0}, "step 4/9  silent for 60 s: the job may be dead"),
        ({"state": "running", "phase": "", "time": 99.0}, "step 4/9  running"),
        ({"state": "stopped", "phase": "", "time": 0.0}, "step 4/9  stopped"),
        ({}, "step 4/?  unknown"),
    ],
)
def test_the_headline(found: dict[str, Any], said: str, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert headline(run, found | ({"step": 4, "total_steps": 9} if found else {}), now=100.0) == said


def test_status_follows_phase_and_ends_with_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "INTERVAL_S", 0.01)
    monkeypatch.setattr(progress, "_ended", {})
    kept = Status(tmp_path, total_steps=9)
    kept.log({}, step=3)
    with progress.within("gen"):
        progress.announce(8, "responses")
        until = time.monotonic() + 60
        while "generating  0 of 8 responses" not in (seen := read_mapping(tmp_path / STATUS_FILE)).get("phase", ""):
            assert time.monotonic() < until, seen
            time.sleep(0.01)
    assert (seen["state"], seen["step"], seen["total_steps"]) == ("running", 3, 9)
    kept.close(ending="stopped")
    assert read_mapping(tmp_path / STATUS_FILE)["state"] == "stopped"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_unwritable_status_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Status(tmp_path / "gone", total_steps=9)
    kept.close()
    assert caplog.text.count("status.json cannot be written, training continues") == 1


def test_command_without_terminal_shows_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", scores={0: 0.125, 4: 0.5})
    (directory / "status.json").write_text(json.dumps({"state": "finished", "step": 4, "total_steps": 4}))
    main([str(directory)])
    shown = capsys.readouterr().out
    assert "step 4/4  finished" in shown
    assert "rose from 0.125 to 0.5" in shown
    assert "reward" in shown and "0.05 -> 0.2" in shown
    assert PROMPTS[0] in shown and "before (score 0)" in shown and "now (score 1)" in shown
    with pytest.raises(SystemExit, match="has no metrics.jsonl"):
        main([str(tmp_path)])
