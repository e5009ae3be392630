"""The random draws and the report of `scripts/chaos.py`; tests/e2e/test_faults.py tests its kills."""

import json
import random
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.faulty import START, Faults

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "chaos", raising=False)
    return import_module("chaos")


def test_kills_cover_all_phases_before_last_save(chaos: ModuleType) -> None:
    durations = dict.fromkeys((START, *chaos.PHASES), 2.0)
    faults = chaos.draw(20, 2, 12, durations, random.Random(1))
    assert len(faults) == 20
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert faults[-1].step < 10  # steps count from 0: after it, the tenth is saved, and there are two more
    counts = Counter(fault.phase for fault in faults)
    assert counts.keys() == durations.keys() and set(counts.values()) == {2, 3}
    assert {fault.rank for fault in faults} == {0, 1}
    assert all(0.0 <= fault.delay_s <= 2.0 for fault in faults)


def test_table_shows_step_and_delay_of_each_resume(
    chaos: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults(tmp_path / "faults.json")
    faults.write([])
    for name, news in {
        "0.begun": {"number": 0, "time": 100.0, "step": 0},
        "0.json": {"number": 0, "time": 130.0, "rank": 1, "step": 3, "phase": "gen"},
        "1.begun": {"number": 1, "time": 142.0, "step": 2},
        "1.json": {"number": 1, "time": 150.0, "rank": 0, "step": 2, "phase": "sync"},
        "2.json": {"number": 2, "time": 155.0, "rank": 0, "step": 0, "phase": START},
        "3.begun": {"number": 3, "time": 170.0, "step": 2},
    }.items():
        (tmp_path / "faults.met" / name).write_text(json.dumps(news))
    assert chaos.report(tmp_path, faults, [], num_kills=3, num_steps=12) == 0
    assert (tmp_path / "table.md").read_text().splitlines()[2:] == [
        "| 1 | 4 | gen | 1 | 2 | 12 |",
        "| 2 | 3 | sync | 0 | killed before it trained | - |",
        "| 3 | - | start | 0 | 2 | 15 |",
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["finished_steps_repeated"] == 1
    assert chaos.report(tmp_path, faults, ["step 1: odd"], num_kills=3, num_steps=12) == 1
    assert chaos.report(tmp_path, faults, [], num_kills=4, num_steps=12) == 1
