"""`megarl compare`: differences of configurations, headline metrics and times, from the files of the runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.commands.compare import main
from megarl.report.read import read_curves

SCORE, VALIDATION, LOSS = "critic/score/mean", "val/test_score/mine", "actor/kl_loss"


def write_run(directory: Path, rows: list[dict[str, Any]], **config: Any) -> str:
    directory.mkdir()
    common = {"trainer": {"default_local_dir": str(directory)}, "actor": {"lr": 1e-6, "clip": 0.2}}
    (directory / "config.yaml").write_text(yaml.safe_dump(common | config))
    lines = [json.dumps({"step": step, "time": 100.0 + step, **row}) for step, row in enumerate(rows)]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(directory)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = [
        {VALIDATION: 0.1},
        {SCORE: 0.2, LOSS: 0.5, "timing_s/step": 2.0},
        {SCORE: 0.6, LOSS: 0.1, "timing_s/step": 4.0, VALIDATION: 0.5},
        {SCORE: 0.4, LOSS: 0.3, "timing_s/step": 3.0, "perf/rare": 7.0},
    ]
    second = [{SCORE: 0.3, "timing_s/step": 1.0}]
    changed = {"actor": {"lr": 1e-5, "clip": 0.2}, "more": {"n": 3}}
    return [write_run(tmp_path / "one", first), write_run(tmp_path / "two", second, **changed)]


def test_numbers_and_differences(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*runs, "--json", "--metric", "perf/*"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, two = found["runs"]
    assert one["metrics"] == {
        VALIDATION: {"first": 0.1, "last": 0.5, "best": 0.5, "best_step": 2},
        SCORE: {"first": 0.2, "last": 0.4, "best": 0.6, "best_step": 2},
        LOSS: {"first": 0.5, "last": 0.3, "best": None, "best_step": None},
        "perf/rare": {"first": 7.0, "last": 7.0, "best": None, "best_step": None},
    }
    assert (one["steps"], one["seconds"], one["seconds_per_step"]) == (3, 9.0, 3.0)
    assert two["metrics"].keys() == {SCORE}
    assert found["differences"] == {"actor.lr": [1e-6, 1e-5]}  # only the second has more.n


def test_the_tables(runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(runs) == 0
    printed = capsys.readouterr().out
    assert "0.2 -> 0.4 (0.6 at 2)" in printed
    assert "actor.lr" in printed
    assert "clip" not in printed
    monkeypatch.setenv("COLUMNS", "60")
    assert main(runs) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and "actor.lr" in printed
    assert main([runs[0], runs[0]]) == 0
    assert "no key that all runs have differs" in capsys.readouterr().out


def test_a_directory_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path} has no metrics.jsonl: name the directory of a run" in capsys.readouterr().err


def test_the_most_similar_run_is_proposed(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([runs[0], f"{runs[1]}s"])
    assert ended.value.code == 2
    assert f"no directory {runs[1]}s: did you mean {runs[1]}?" in " ".join(capsys.readouterr().err.split())


def test_a_run_without_metrics_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(tmp_path) == []
