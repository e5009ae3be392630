"""The report of a run: what is read, what is said, and the page as a real browser shows it."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.commands.report import main
from megarl.platform.errors import UserError
from megarl.report import page
from megarl.report.charts import CHARTS, figures, running_mean, thin
from megarl.report.differences import between, from_default
from megarl.report.page import library, render
from megarl.report.read import Run, RunReader, read_mapping, read_run
from megarl.report.summary import faults, notes, score_of, summary
from megarl.report.tracker import REPORT_FILE, ReportTracker
from megarl.tracking import lines
from megarl.tracking.history import History
from megarl.tracking.jsonl import Jsonl, read_jsonl
from scripts.metrics import describe
from tests.support.browsers import BROWSER, browse
from tests.support.runs import config_of, write_run

SCORE = "critic/score/mean"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


def test_every_chart_metric_is_recorded_by_run() -> None:
    names = [name for chart in CHARTS for name in chart.metrics if not name.endswith("/")]
    assert [name for name in names if describe(name) is None] == []


@pytest.mark.parametrize(
    ("event", "words"),
    [("start", "not finished"), ("resume", "not finished"), ("finished", "finished"), ("stopped", "stopped")],
)
def test_the_summary_says_how_a_run_ended(event: str, words: str) -> None:
    run = replace(run_with(critic__score__mean=[0.1, 0.2]), history=[{"event": event}])
    assert f"2 steps, {words};" in render([run])


def run_with(**metrics: list[float]) -> Run:
    """Return a run with these curves, from step 1; `__` in a name is a slash."""
    length = max(map(len, metrics.values()))
    rows = [
        {"step": step + 1} | {name.replace("__", "/"): values[step] for name, values in metrics.items()}
        for step in range(length)
    ]
    with TemporaryDirectory() as directory:
        (Path(directory) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return replace(read_run(Path(directory)), directory=Path("r"))


def test_files_of_a_run_are_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "first"))
    assert (run.name, run.last_step, sorted(run.samples)) == ("first", 4, [0, 4])
    assert run.points("critic/score/mean") == [(1, 0.05), (2, 0.1), (3, 0.15), (4, 0.2)]
    assert run.config["trainer"]["project_name"] == "megarl_examples"
    assert [row["event"] for row in run.history] == ["start", "finished"]


def test_damaged_and_missing_files_leave_their_part_empty(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "config.yaml").write_text("{")
    (directory / "history.jsonl").unlink()
    (directory / "val_generations.jsonl").write_text('{"step": 1}\nhalf a li')
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/sc')
    run = read_run(directory)
    assert (run.config, run.history, run.samples, run.last_step) == ({}, [], {}, 4)
    assert "Plotly" in render([run])
    (directory / "history.jsonl").touch()
    (directory / "metrics.jsonl").unlink()
    assert "has recorded no score yet" in render([read_run(directory)])  # as before the first step
    with pytest.raises(ValueError, match=r"elsewhere has no metrics.jsonl: name the directory of a run"):
        read_run(tmp_path / "elsewhere")


def test_deeply_nested_files_are_damaged(tmp_path: Path) -> None:
    for name, text in (("status.json", '{"a":' * 100_000), ("config.yaml", "a: " + "[" * 3000 + "]" * 3000)):
        (tmp_path / name).write_text(text)
        assert read_mapping(tmp_path / name) == {}


@settings(max_examples=60)
@given(st.sampled_from(["step", "prompt", "response", "score"]), JSON, st.sampled_from(["step", "time", SCORE]), JSON)
@example("score", "good", "time", None)
@example("prompt", 7, "step", "two")
def test_values_of_other_types_leave_out_their_row(sampled: str, value: Any, measured: str, number: Any) -> None:
    with TemporaryDirectory() as scratch:
        directory = write_run(Path(scratch) / "run")
        for name, key, changed in (("val_generations.jsonl", sampled, value), ("metrics.jsonl", measured, number)):
            rows = [json.loads(line) for line in (directory / name).read_text().splitlines()]
            rows[1] |= {key: changed}
            (directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert "</html>" in render([read_run(directory)])


def test_values_that_are_not_finite_are_no_points() -> None:
    assert run_with(loss=[1.0, float("nan"), float("inf")]).points("loss") == [(1, 1.0)]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            {"val__test_score__a": [0.1, 0.6, 0.5], "val__test_score__b": [0.3, 0.4, 0.3]},
            "The validation score rose from 0.2 to 0.4 at step 3 (better); the best is 0.5 at step 2.",
        ),
        (
            {"critic__score__mean": [0.5, 0.25], "val__loss": [2.0, 2.5]},
            "The held-out loss rose from 2 to 2.5 at step 2 (worse); the best is 2 at step 1.",
        ),
        (
            {"sft__loss": [2.0, 0.5]},
            "The training loss fell from 2 to 0.5 at step 2 (better); the best is 0.5 at step 2.",
        ),
        (
            {"critic__score__mean": [0.5, 0.9, 0.504]},
            "The training reward hardly changed: 0.5 at step 1, 0.504 at step 3; the best is 0.9 at step 2.",
        ),
        (
            {"reward_model__accuracy": [0.75]},
            "The training accuracy is 0.75 at step 1; there is no second value yet.",
        ),
        ({"actor__lr": [0.1]}, "r has recorded no score yet."),
    ],
)
def test_the_summary_is_one_sentence(metrics: dict[str, list[float]], said: str) -> None:
    assert summary(run_with(**metrics)) == said


def test_the_best_of_a_loss_is_the_least() -> None:
    score = score_of(run_with(val__loss=[3.0, 1.0, 2.0]))
    assert score
    assert (score.best, score.is_better) == ((2, 1.0), True)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"val__test_score__a": [0.0, 1.0, 0.5]}, "worse than at step 2"),
        ({"critic__score__min": [0.0, 0.5, 0.5, 0.5], "critic__score__max": [1.0, 0.5, 0.5, 0.5]}, "has the score 0.5"),
        ({"actor__entropy": [1.0, 0.5, 0.05, 0.05, 0.05, 0.05, 0.05]}, "entropy has fallen"),
        ({"response_length__clip_ratio": [0.0, 1.0, 0.5]}, "50% of the latest responses reach the length limit"),
        ({"actor__grad_norm": [1.0, 1.0, 1.0, 11.0, 1.0, 1.0]}, "peaks (11, median 1)"),
        ({"training__rollout_mismatch": [6.0], "training__rollout_mismatch_limit": [10.0]}, "disagree"),
        ({"reward__masked_rate": [0.0, 0.25]}, "reward failed on 12.5% of the latest responses"),
    ],
)
def test_what_a_person_should_look_at(metrics: dict[str, list[float]], said: str) -> None:
    (found,) = notes(run_with(**metrics))
    assert said in found


def test_a_run_that_learns_gives_no_remark(tmp_path: Path) -> None:
    assert list(notes(run_with(sft__loss=[3.0, 1.0, 2.0]))) == []  # of its samples, which differ from step to step
    assert list(notes(run_with(critic__score__min=[0.0] * 4, critic__score__max=[0.0, 0.0, 1.0, 0.0]))) == []
    assert list(notes(read_run(write_run(tmp_path / "run", scores={0: 0.1, 4: 0.5})))) == []


def test_faults_are_counted(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "nonfinite").mkdir()
    facts = {"model": "actor", "step": 2, "minibatch": 0, "loss": "nan", "grad_norm": "inf"}
    (directory / "nonfinite" / "step_2_actor_0.json").write_text(json.dumps(facts))
    (directory / "hang-20260101-000000-1").mkdir()
    assert list(faults(read_run(directory))) == [
        "1 updates of the actor were skipped: loss or gradient was not finite",
        "step 2: mini-batch 0 of the actor: loss nan, gradient norm inf",
        "a rank made no progress: hang-20260101-000000-1 has the stacks of all ranks",
    ]


def test_long_curve_is_thinned_to_means_of_neighbours() -> None:
    assert thin([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]
    assert thin([(1, 1.0)], 2) == [(1, 1.0)]
    assert thin([], 2) == []
    assert running_mean([(1, 1.0), (2, 2.0)]) == [(1, 1.0), (2, pytest.approx(1.2))]


def test_ticks_are_steps_and_runs_compare_step_time() -> None:
    run = run_with(timing_s__gen=[1.0, 1.0, 1.0], timing_s__sync=[0.5, 0.5, 0.5], timing_s__step=[2.0, 2.0, 2.0])
    [alone] = figures([run])
    assert (alone["title"], [trace["name"] for trace in alone["data"]]) == ("Time by phase", ["gen"])
    assert alone["layout"]["xaxis"]["dtick"] == 1
    [both] = figures([run, run_with(timing_s__step=[3.0] * 30)])
    assert (both["title"], [trace["name"] for trace in both["data"]]) == ("Time of a step", ["r: step", "r: step"])
    assert "dtick" not in both["layout"]["xaxis"]


def test_only_keys_changed_by_user_differ_from_default() -> None:
    assert [item.key for item in from_default(config_of("algorithm.gamma=0.5"))] == [
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "critic.model.path",
        "algorithm.gamma",
        "algorithm.use_kl_in_reward",  # null is resolved
    ]


def test_keys_that_differ_between_runs(tmp_path: Path) -> None:
    configs = config_of(), config_of("algorithm.gamma=0.5") | {"newer": {"key": 1}}
    runs = [read_run(write_run(tmp_path / f"{number}", config=config)) for number, config in enumerate(configs)]
    assert between([run.config for run in runs]) == {"algorithm.gamma": [1.0, 0.5]}


def test_user_filled_mapping_differs_as_one_value() -> None:
    key = "custom_reward_function.reward_kwargs"
    configs = [config_of(), config_of(f"{key}={{weight: 0.5}}"), config_of(f"{key}={{weight: 0.5, depth: 3}}")]
    assert between(configs) == {key: [{}, {"weight": 0.5}, {"weight": 0.5, "depth": 3}]}
    assert [item.value for item in from_default(configs[1]) if item.key == key] == ["{'weight': 0.5}"]


def until(holds: Callable[[], bool]) -> None:
    """Wait until a thread has made something true."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_reader_reads_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines in any portions, cut anywhere, give the curves of one reading; a half line is read when it is complete."""
    monkeypatch.setattr(lines, "_parse", parsed := Mock(wraps=lines._parse))
    metrics = [{"step": step, "loss": step / 2} | ({"val/a": 1.0} if step % 5 == 0 else {}) for step in range(40)]
    samples = [{"step": step, "prompt": "p", "response": f"{step}", "score": 1.0} for step in range(0, 40, 5)]
    content = [b"".join(json.dumps(row).encode() + b"\n" for row in rows) for rows in (metrics, samples)]
    reader = RunReader(tmp_path)
    for cut in (0, 300, 301, 750, 1200, 10_000):
        for name, whole in zip(("metrics.jsonl", "val_generations.jsonl"), content, strict=True):
            (tmp_path / name).write_bytes(whole[:cut])
        run = reader.read()
    assert parsed.call_count <= len(metrics) + len(samples) + 2 * 6  # a half line of each file, each time
    assert run == read_run(tmp_path)
    assert run.points("loss") == [(row["step"], row["loss"]) for row in metrics] and run.last_step == 39
    assert {step: row["response"] for step, [row] in run.samples.items()} == {0: "0", 35: "35"}


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    steps = [3, 1, 2, 7, 5]
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {step}}}\n' for step in steps))
    assert read_run(tmp_path).points("loss") == [(step, step) for step in sorted(steps)]


def test_the_report_never_holds_up_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, may_end, written = Event(), Event(), list[int]()

    def write(runs: list[Run], path: Path) -> None:
        written.append(runs[0].last_step)
        started.set()
        assert may_end.wait(60)

    monkeypatch.setattr(page, "write_report", write)
    records, report = Jsonl(tmp_path), ReportTracker(tmp_path)
    for step in (1, 2, 3):
        for tracker in (records, report):
            tracker.log({"val/loss": 1.0}, step=step)
        assert started.wait(60)  # the first report is being written
    may_end.set()
    report.close()
    assert written == [1, 3]


def test_failed_report_is_named_by_the_next(tmp_path: Path) -> None:
    report = ReportTracker(tmp_path)
    report.log({"val/loss": 1.0}, step=1)  # the directory has no records
    until(lambda: report._report is not None and report._report.done())
    with pytest.raises(UserError, match="has no metrics.jsonl"):
        report.log({"val/loss": 1.0}, step=2)


def test_the_report_follows_each_validation_and_the_end(tmp_path: Path) -> None:
    trackers = Jsonl(tmp_path), History(tmp_path), ReportTracker(tmp_path)
    file = tmp_path / REPORT_FILE

    def log(metrics: dict[str, float], step: int) -> None:
        for tracker in trackers:
            tracker.log(metrics, step=step)

    log({"critic/score/mean": 0.5}, 1)
    assert not file.exists()
    log({"critic/score/mean": 0.5, "val/test_score/a": 0.25}, 2)
    until(lambda: file.exists() and "The validation score is 0.25 at step 2" in file.read_text())
    log({"critic/score/mean": 0.75, "val/loss": 1.0}, 3)
    for tracker in trackers:
        tracker.close(ending="stopped")
    assert "3 steps" in file.read_text()
    assert "stopped" in file.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("row", [{}, {"event": None}, *({"event": "start", "time": bad} for bad in ("x", None, 1e300))])
def test_foreign_lines_of_the_history_are_borne(row: dict[str, Any], tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with (directory / "history.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4} | row) + "\n")
    History(directory, resume_step=4).close()
    assert "</html>" in render([read_run(directory)])


def test_history_continues_on_resume_and_restarts_otherwise(tmp_path: Path) -> None:
    first = History(tmp_path)
    first.log({}, step=3)
    first.close(ending="stopped")
    History(tmp_path, resume_step=3).close()
    rows = read_jsonl(tmp_path / "history.jsonl")
    assert [(row["event"], row["step"]) for row in rows] == [
        ("start", 0),
        ("stopped", 3),
        ("resume", 3),
        ("finished", 3),
    ]
    History(tmp_path, resume_step=3).close()
    assert read_jsonl(tmp_path / "history.jsonl") == rows, "nothing was left to do"
    longer = History(tmp_path, resume_step=3)
    longer.log({}, step=4)
    longer.close()
    rows = read_jsonl(tmp_path / "history.jsonl")
    assert [(row["event"], row["step"]) for row in rows[4:]] == [("resume", 3), ("finished", 4)]
    assert rows[0]["versions"]["torch"]
    assert rows[0]["command"]
    History(tmp_path)
    assert len(read_jsonl(tmp_path / "history.jsonl")) == 1


def test_the_command_writes_one_page_for_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, scores={0: 0.1, 4: score}) for name, score in (("one", 0.2), ("two", 0.3))]
    main([str(runs[0])])
    assert capsys.readouterr().out == f"{runs[0] / REPORT_FILE}\n"
    monkeypatch.chdir(tmp_path)
    main(list(map(str, runs)))
    page = (tmp_path / REPORT_FILE).read_text()
    assert "<td>one</td>" in page
    assert "rose from 0.1 to 0.3" in page
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    assert "empty has no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
def test_browser_renders_every_chart_without_errors_or_requests(tmp_path: Path) -> None:
    """The page forbids requests (Content-Security-Policy), so the browser would report one as an error."""
    main([str(write_run(tmp_path / "run"))])
    dom, errors = browse(tmp_path / "run" / REPORT_FILE)
    assert errors == []
    assert 'data-drawn="true"' in dom
    titles = re.findall(r"<figcaption>([\w ]+)<", dom)
    assert {
        "Validation score",
        "Training reward",
        "KL to the reference",
        "Entropy",
        "Gradient norms",
        "Time by phase",
    } <= {*titles}
    lines = re.findall(r'class="js-line" d="M[^"]*L', dom)  # with two points at least
    assert len(lines) >= len(titles)
    assert "of step 4" in dom


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
def test_browser_reports_script_errors_and_forbidden_requests(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = render([read_run(write_run(tmp_path / "run"))]).replace(library(), "")
    page.write_text(text.replace("<body>", '<body><img src="http://127.0.0.1:9/a.png">'))
    dom, errors = browse(page)
    assert "The charts cannot be drawn" in dom
    assert any("violates the following Content Security Policy" in error for error in errors)
    assert any("Uncaught" in error for error in errors)
