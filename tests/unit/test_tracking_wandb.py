"""Weights & Biases without a network: its own files, read back through its own reader."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.protocol import Tracker
from megarl.tracking.run_id import WANDB_RUN_ID_FILE
from megarl.tracking.wandb import UNFINISHED_FILE
from tests.support.outcomes import wandb_history, wandb_records
from tests.support.trackers import tracker_of

PARAMS = {"data": {"seed": 1}, "trainer": {"logger": ["wandb"]}}


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def tracker(run_dir: Path, **options: Any) -> Tracker:
    return tracker_of("wandb", run_dir, **{"params": PARAMS} | options)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["_step"], row["loss"]) for row in wandb_history(run_dir) if "loss" in row]


def log(tracker: Tracker, *steps: int, scale: float = 1.0) -> None:
    for step in steps:
        tracker.log({"loss": step * scale, "val-core/countdown/mean@1": 0.5}, step=step)


def test_wandb_files_hold_configuration_metrics_and_tables_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ann/program.py"])
    run = tracker(tmp_path)
    log(run, 1, 2)
    run.log_table("val/generations", [{"prompt": "3 5 é", "score": 1.0}, {"prompt": "b", "score": 0.0}], step=2)
    run.close([{"exported": "runs/hf"}])
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]
    assert {row["val-core/countdown/mean@1"] for row in wandb_history(tmp_path)} == {0.5}
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/generations_2_*.table.json")
    content = json.loads(table.read_text())
    assert (content["columns"], content["data"]) == (["prompt", "score"], [["3 5 é", 1.0], ["b", 0.0]])
    (opened,) = [record.run for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert {name: value for name, value in config.items() if name != "_wandb"} == PARAMS
    assert (opened.project, opened.display_name, opened.run_id) == (
        "p",
        "e",
        (tmp_path / WANDB_RUN_ID_FILE).read_text(),
    )
    said = "".join(map(str, wandb_records(tmp_path)))
    assert "program.py" not in said and str(Path.cwd()) not in said


def killed_at_four(run_dir: Path) -> None:
    """Record four steps, and a table of the second, in a process that is killed."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.unit.test_tracking_wandb import log, tracker\n"
        "run = tracker(Path(sys.argv[1])); log(run, 1)\n"
        "run.log_table('val/generations', [{'prompt': 'a', 'score': 1.0}], step=2)\n"
        "log(run, 2, 3, 4); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(run_dir)], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_killed_run_loses_or_duplicates_no_step(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    run_id = (tmp_path / WANDB_RUN_ID_FILE).read_text()
    again = tracker(tmp_path, resume_step=2)
    log(again, 3, 4, 5)
    again.close()
    assert losses(tmp_path) == [(step, float(step)) for step in (1, 2, 3, 4, 5)]
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/val/generations_*.table.json"))) == 1
    assert (tmp_path / WANDB_RUN_ID_FILE).read_text() == run_id
    last = tracker(tmp_path, resume_step=4)  # ended after the checkpoint: existing steps are not sent again
    log(last, 5, 6)
    last.close()
    assert losses(tmp_path) == [(step, float(step)) for step in (1, 2, 3, 4, 5, 6)]
    assert {record.run.run_id for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "run"} == {
        run_id
    }


def test_changed_curve_on_resume_starts_new_wandb_run(tmp_path: Path) -> None:
    run = tracker(tmp_path)
    log(run, 1, 2, 3)
    run.close(ending="stopped")
    run_id = (tmp_path / WANDB_RUN_ID_FILE).read_text()
    other = tracker(tmp_path, resume_step=2, same_curve=False, resume_metrics={"loss": 2.0})
    log(other, 3, scale=10)
    other.close()
    assert (tmp_path / WANDB_RUN_ID_FILE).read_text() != run_id
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.0), (3, 30.0)]
    tracker(tmp_path).close()  # a new run in the same place
    assert read_jsonl(tmp_path / UNFINISHED_FILE) == [{"kind": "finished", "step": -1}]


@pytest.mark.parametrize("login", ["variable", "netrc"])
def test_unresponsive_server_costs_no_record(
    login: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if login == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    else:  # as `wandb login` leaves it
        netrc = tmp_path_factory.mktemp("home") / "netrc"
        netrc.write_text(f"machine 127.0.0.1:9\n  login user\n  password {'0123456789' * 4}\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setattr("megarl.tracking.wandb.START_S", 1.0)
    with caplog.at_level(logging.WARNING):
        run = tracker(tmp_path)
    assert "W&B does not respond" in caplog.text
    log(run, 1, 2)
    run.close()
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"0123456789" * 2 not in written


def test_endless_process_delays_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    never = threading.Event()
    end = wandb.teardown
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr("megarl.tracking.wandb.START_S", 1.0)
    monkeypatch.setattr(wandb, "teardown", lambda: (end(), never.wait()))
    run = tracker(tmp_path)
    monkeypatch.setattr(wandb, "teardown", end)
    log(run, 1, 2)
    run.close()
    never.set()
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_a_tracker_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    run = tracker(tmp_path)
    wandb.teardown()  # end its process
    with caplog.at_level(logging.WARNING):
        log(run, 1, 2)
        run.close()
    assert caplog.text.count("wandb accepts no records, training continues") == 1
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    again = tracker(tmp_path, resume_step=2)
    again.close()
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_step_that_fails_costs_no_other_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk.wandb_run import Run

    send = Run.log

    def fail_at_3(run: Run, data: Any, step: int) -> None:
        if step == 3:
            raise ValueError("no such value")
        send(run, data, step=step)

    first = tracker(tmp_path)
    log(first, 1)
    first.close()
    metrics = [{"step": step, "time": 1.0, "loss": float(step)} for step in (2, 3, 4, 5)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in metrics))
    monkeypatch.setattr(Run, "log", fail_at_3)
    again = tracker(tmp_path, resume_step=5)
    log(again, 6)
    again.close()
    assert losses(tmp_path) == [(step, float(step)) for step in (1, 2, 4, 5, 6)]


def test_records_of_an_earlier_version_are_sent_once(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    log(first, 1, 2)
    first.close()
    metrics = [{"step": 3, "time": 1.0, "loss": 3.0}, {"step": 4, "time": 1.0, "loss": 4.0}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in metrics))
    part = tmp_path / "wandb" / "offline-run-of-a-killed-process"
    part.mkdir()
    old = [{"kind": "finished", "step": 2}, {"kind": "part", "directory": str(part)}]
    old += [{"kind": "metrics", "step": row["step"], "values": {"loss": row["loss"]}} for row in metrics]
    (tmp_path / UNFINISHED_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in old))
    again = tracker(tmp_path, resume_step=3)
    log(again, 4, 5)
    again.close()
    assert losses(tmp_path) == [(step, float(step)) for step in (1, 2, 3, 4, 5)]
    assert not part.exists()
    assert read_jsonl(tmp_path / UNFINISHED_FILE) == [{"kind": "finished", "step": 5}]
