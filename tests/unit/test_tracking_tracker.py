"""Trackers: what the console prints, what the files hold, and that a resumed run continues its records."""

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.platform import progress
from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.distributed.watchdog import note, watching
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.tracking.console import Console
from megarl.tracking.history import origin
from megarl.tracking.jsonl import Jsonl, read_jsonl
from megarl.tracking.protocol import NullTracker, Tracker
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Trackers, recording
from tests.support.trackers import tracker_of

NEEDED = ["actor_rollout_ref.model.path=m", "critic.model.path=m", "data.train_files=f"]
STEP = {
    "critic/score/mean": 0.25,
    "actor/reward_kl_penalty": 0.00312,
    "perf/total_num_tokens": 2468.8,
    "timing_s/gen": 1.5,
    "timing_s/sync": 0.5,
    "timing_s/update_actor": 0.4,
    "timing_s/step": 2.0,
}


def test_a_repository_without_commits_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # noqa: S607
    monkeypatch.chdir(tmp_path)
    assert "commit" not in origin()


def jsonl(run_dir: Path, **options: Any) -> Tracker:
    return tracker_of("jsonl", run_dir, **options)


def run_of_three_steps(terminal: bool) -> str:
    out = io.StringIO()
    console = Screen(file=out, width=100, force_terminal=terminal, color_system=None, legacy_windows=False)
    places = [("report", "runs/" + "quickstart/" * 12 + "report.html")]
    tracker = Console(total_steps=3, console=console, next_steps=lambda ending: places)
    tracker.log_table("val/generations", [{"prompt": "3 5 = 8 :", "response": "3", "score": 0.0}], step=0)
    tracker.log({"val-core/countdown/reward/mean@1": 0.125}, step=0)
    tracker.log(STEP, step=1)
    tracker.log(STEP | {"critic/score/mean": 0.5, "timing_s/step": 4.0}, step=2)
    tracker.log(STEP | {"val-core/countdown/reward/mean@1": 0.5}, step=3)
    tracker.log_table("val/generations", [{"prompt": "3 5 = 8 :", "response": "[3]+5", "score": 1.0}], step=3)
    tracker.close([{"exported": "runs/quickstart/hf"}])
    return out.getvalue()


SNAPSHOT = f"""\
step 0/3  validation countdown/reward/mean@1 0.125
step 1/3  reward 0.250  kl to reference 0.0031  1,234 tokens/s  left 0:00:04
step 2/3  reward 0.500  kl to reference 0.0031  617 tokens/s  left 0:00:03
step 3/3  reward 0.250  kl to reference 0.0031  1,234 tokens/s  validation countdown/reward/mean@1 0.5  left 0:00:00
val/generations at step 0 (before) and 3 (now)

  prompt      before   now     score before   score now
 ───────────────────────────────────────────────────────
  3 5 = 8 :   3        [3]+5              0           1

run finished

  score                                first   last   best   change
 ───────────────────────────────────────────────────────────────────
  validation countdown/reward/mean@1   0.125    0.5    0.5    0.375
  training reward                       0.25   0.25    0.5        0

time

  phase          seconds   share
 ────────────────────────────────
  step           8.0       100%
  gen            4.5       56%
  gen: sync      1.5       19%
  update_actor   1.2       15%

summary

  exported
 ────────────────────
  runs/quickstart/hf

report      runs/{"quickstart/" * 12}report.html
"""


def test_console_without_a_terminal() -> None:
    assert "\n".join(line.rstrip() for line in run_of_three_steps(terminal=False).splitlines()) + "\n" == SNAPSHOT


def test_terminal_console_shows_live_line_and_same_tables() -> None:
    shown = run_of_three_steps(terminal=True)
    assert "step 2/3 ━" in shown
    assert "reward 0.500  kl to reference 0.0031  617 tokens/s  left 0:00:03" in shown
    assert "validation  countdown/reward/mean@1 0.5  (+0.375 since the first)" in shown
    assert "\x1b[?25h" in shown  # the cursor is given back
    assert shown.rstrip().endswith("report.html")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_line_is_glued_to_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console that a run makes for itself also draws its bars."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    tracker = Console(total_steps=2)
    tracker.log({"val/test_score/a": 0.125}, step=0)
    tracker.log(STEP | {"val/test_score/a": 0.25}, step=1)
    tracker.close()
    before = [text[-1:] for text in re.split(r"step \d/2  validation", terminal.getvalue())[:-1]]
    assert len(before) == 2
    assert [end for end in before if end not in ("\n", "\r", "K")] == []  # K ends the code that erases a line


def test_on_a_terminal_the_bar_names_the_phase() -> None:
    out = io.StringIO()
    tracker = Console(total_steps=2, console=Screen(file=out, width=100, force_terminal=True))
    with progress.within("gen"):
        progress.announce(64, "responses")
        progress.advance(37)
        tracker.log(STEP, step=1)
    tracker.close()
    assert "generating  37 of 64 responses  0:00:00" in out.getvalue()


def test_console_of_a_run_that_learns_from_files() -> None:
    out = io.StringIO()
    tracker = Console(total_steps=2, console=Screen(file=out, width=100))
    tracker.log({"reward_model/loss": 0.6931, "reward_model/accuracy": 0.5, "val/accuracy": 0.75}, step=1)
    assert out.getvalue() == "step 1/2  loss 0.6931  accuracy 0.5000  held-out accuracy 0.7500\n"


def test_null_tracker_is_what_other_ranks_hold(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path / "run", is_main=False)
    assert isinstance(tracker, NullTracker)
    tracker.log(STEP, step=1)
    tracker.log_table("t", [{"a": 1}], step=1)
    tracker.close()
    assert not (tmp_path / "run").exists()


class Failing(NullTracker):
    """A tracker whose method `method` fails."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self.fail)

    def fail(self, *args: Any, **options: Any) -> None:
        raise RuntimeError("unbalanced markup")


@pytest.mark.parametrize("method", ["log", "log_table", "close"])
@pytest.mark.parametrize("is_first", [True, False])
def test_failing_tracker_costs_its_records_and_one_warning(
    method: str, is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed = list[str]()
    file = Jsonl(tmp_path)
    monitored = NullTracker()
    monitored.close = lambda *args, ending, **options: closed.append(ending)  # type: ignore[method-assign]
    both = {"console": Failing(method), "jsonl": file}
    trackers = Trackers({**(both if is_first else dict(reversed(both.items()))), "monitored": monitored})
    with recording(trackers), caplog.at_level(logging.WARNING):
        for step in (1, 2):
            trackers.log({"loss": 1.0 / step}, step=step)
            trackers.log_table("val/generations", [{"score": step}], step=step)
    assert closed == ["finished"]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in read_jsonl(tmp_path / "val_generations.jsonl")] == [1, 2]
    (warning,) = caplog.messages
    assert warning == "console accepts no records, training continues: RuntimeError: unbalanced markup"


PLUGIN = """
class Papyrus:
    def __init__(self, run, records):
        self.file = open(run.run_dir / "papyrus.txt", "w")
        self.file.write(f"{run.experiment} {records.metrics.path.name}\\n")

    def log(self, metrics, *, step):
        self.file.write(f"{step} {metrics}\\n")

    def log_table(self, name, rows, *, step):
        raise RuntimeError("papyrus has no tables")

    def close(self, summary_rows=(), *, ending="finished"):
        self.file.write(ending)
        self.file.close()
"""


def install_plugin(directory: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = "papyrus") -> None:
    """Install a package that offers a tracker."""
    module = f"{name}_plugin"
    (directory / f"{module}.py").write_text(PLUGIN)
    metadata = directory / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[megarl.trackers]\n{name} = {module}:Papyrus\n")
    monkeypatch.syspath_prepend(directory)


def test_a_package_may_offer_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_plugin(tmp_path, monkeypatch)
    tracker = tracker_of("papyrus", tmp_path / "run")
    with recording(tracker):
        tracker.log({"loss": 0.5}, step=1)
        tracker.log_table("val/generations", [{"score": 1}], step=1)
    assert (tmp_path / "run" / "papyrus.txt").read_text() == "e metrics.jsonl\n1 {'loss': 0.5}\nfinished"
    assert "papyrus accepts no records, training continues: RuntimeError: papyrus has no tables" in caplog.text


def test_names_of_trackers_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reason in (
        ("papyrus", "papyrus is none of console, jsonl, mlflow, tensorboard, wandb, and no installed package offers"),
        ("clearml", "clearml is not supported: write wandb, mlflow, tensorboard, jsonl or console"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            load_config([*NEEDED, f"trainer.logger={name}"], world_size=None, check_paths=False)
        install_plugin(tmp_path, monkeypatch, name=name)
        config = load_config([*NEEDED, f"trainer.logger=[{name},file]"], world_size=None, check_paths=False)
        assert config.trainer.logger == [name, "jsonl"]


def test_tracker_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, name="reed")
    (tmp_path / "reed_plugin.py").write_text("import a_library_of_clay")
    with pytest.raises(UserError, match=r"trainer.logger: reed \(reed_plugin:Papyrus\) .* 'a_library_of_clay'"):
        tracker_of("reed", tmp_path)


def test_metrics_and_tables_are_lines_at_once(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path)
    tracker.log(STEP, step=1)
    tracker.log_table("val/generations", [{"prompt": "é", "score": 1.0}, {"prompt": "b", "score": 0.0}], step=1)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before any close
    assert {key: value for key, value in json.loads(line).items() if key != "time"} == {"step": 1, **STEP}
    assert read_jsonl(tmp_path / "val_generations.jsonl")[0] == {"step": 1, "prompt": "é", "score": 1.0}


def test_resumed_run_removes_records_of_repeated_steps(tmp_path: Path) -> None:
    first = jsonl(tmp_path)
    for step in range(1, 5):
        first.log({"critic/score/mean": float(step)}, step=step)
        first.log_table("samples", [{"text": str(step)}], step=step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/sco')  # killed in the middle of a line

    second = jsonl(tmp_path, resume_step=2)
    second.log({"critic/score/mean": 30.0}, step=3)
    second.log_table("samples", [{"text": "again"}], step=3)
    assert [row["critic/score/mean"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 30.0]
    assert [row["text"] for row in read_jsonl(tmp_path / "samples.jsonl")] == ["1", "2", "again"]

    jsonl(tmp_path).log({"critic/score/mean": 0.0}, step=1)  # a new run in the same place
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_saved_step_without_line_gets_one_on_resume(tmp_path: Path) -> None:
    jsonl(tmp_path).log({"loss": 1.0}, step=1)
    for step in (1, 2, 2):
        jsonl(tmp_path, resume_step=step, resume_metrics={"loss": step / 2})
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 1.0)]


def test_timers_sum_repeated_phases_and_survive_failure() -> None:
    timers = Timers()
    with timers("gen"):
        pass
    first = timers.seconds()["timing_s/gen"]
    with pytest.raises(RuntimeError), timers("gen"):
        raise RuntimeError
    with timers("step"), timers("adv"):
        pass
    seconds = timers.seconds()
    assert set(seconds) == {"timing_s/gen", "timing_s/step", "timing_s/adv"}
    assert seconds["timing_s/gen"] > first > 0
    assert seconds["timing_s/step"] > seconds["timing_s/adv"]


def test_watchdog_returns_to_outer_phase_after_inner_phase(tmp_path: Path) -> None:
    with watching(tmp_path / "hang", rank=0, world_size=1, timeout_s=3600.0), Timers()("testing"):
        with Timers()("sync"):
            assert note() == "sync"
        assert note() == "testing"
