"""MLflow for all runs of a project: one store, and what it says about each run."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.platform.terminal import COMMAND
from megarl.tracking.mlflow_place import create_database, database_of
from megarl.tracking.run_id import RUN_ID_FILE
from tests.support.trackers import mlflow_client as client
from tests.support.trackers import tracker_of


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_runs_that_start_together_make_one_database(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for creation in [pool.submit(create_database, tmp_path / "p" / "mlflow.db") for _ in range(2)]:
            creation.result()
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["mlflow.db"]


def test_project_runs_share_store_and_describe_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, "/opt/bin/megarl train configs/my.yaml model.path=models/small")
    data = tmp_path / "train.parquet"
    data.write_bytes(b"rows")
    params = {"data": {"train_files": [str(data)], "val_files": None}, "model": {"path": "models/small"}}
    for name in ("first", "second"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        (run_dir / "report.html").write_text(name)
        started = tracker_of("mlflow", run_dir, project="project", experiment=name, params=params)
        started.log({"val/test_score/a": 0.25, "val/test_score/b": 0.75, "critic/score/mean": 0.1}, step=1)
        started.log({"actor/ppo_kl": 0.5, "timing_s/step": 2.0}, step=1)
        started.close()
    store = client(tmp_path)
    (experiment,) = [found for found in store.search_experiments() if found.name == "project"]
    runs = store.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"first", "second"}
    run = store.get_run((tmp_path / "first" / RUN_ID_FILE).read_text())
    heads = {name: run.data.metrics[name] for name in ("val/score", "train/reward", "train/kl", "time/step")}
    assert heads == {"val/score": 0.5, "train/reward": 0.1, "train/kl": 0.5, "time/step": 2.0}
    tags = run.data.tags
    assert tags["megarl.run_dir"] == str(tmp_path / "first")
    assert tags["mlflow.source.name"] == "megarl train my.yaml"
    assert "\n/opt/bin/megarl train configs/my.yaml model.path=models/small\n" in tags["mlflow.note.content"]
    assert f"(#/metric?runs=%5B%22{run.info.run_id}%22%5D&" in tags["mlflow.note.content"]
    assert tags["mlflow.user"]
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.tags[0].value) == ("train.parquet", "training")
    assert str(data) in given.dataset.source
    (model,) = run.inputs.model_inputs
    logged = store.get_logged_model(model.model_id)
    assert (logged.name, logged.tags["path"]) == ("small", "models/small")
    page = store.download_artifacts(run.info.run_id, "report.html", str(tmp_path / "first"))
    assert Path(page).read_text() == "first"
    kept = [file.path for file in store.list_artifacts(run.info.run_id)]
    assert kept == ["metrics.jsonl", "report.html"]  # no other file is there


def test_headline_metrics_come_first_after_initial_validation(tmp_path: Path) -> None:
    tracker = tracker_of("mlflow", tmp_path / "run")
    tracker.log({"val/reward/rare": 0.5, "val/test_score/a": 0.25}, step=0)
    tracker.log({"actor/lr": 1.0, "critic/score/mean": 0.1, "timing_s/step": 2.0}, step=1)
    tracker.close()
    run = client(tmp_path).get_run((tmp_path / "run" / RUN_ID_FILE).read_text())
    heads = ["val/score", "train/reward", "time/step"]
    assert list(run.data.metrics)[:3] == heads
    history = client(tmp_path).get_metric_history(run.info.run_id, "val/reward/rare")
    assert [(found.step, found.value) for found in history] == [(0, 0.5)]
    only = tracker_of("mlflow", tmp_path / "only")
    only.log({"val/reward/rare": 0.5}, step=0)
    only.close()
    run = client(tmp_path).get_run((tmp_path / "only" / RUN_ID_FILE).read_text())
    assert run.data.metrics == {"val/reward/rare": 0.5}


def test_a_validation_is_shown_beside_the_first(tmp_path: Path) -> None:
    tracker = tracker_of("mlflow", tmp_path / "run")
    for step, score in ((0, 0.0), (2, 0.5), (4, 1.0)):
        tracker.log_table("val/generations", [{"prompt": "1 1", "response": f"of {step}", "score": score}], step=step)
    tracker.close()
    store = client(tmp_path)
    run_id = (tmp_path / "run" / RUN_ID_FILE).read_text()
    table = json.loads(Path(store.download_artifacts(run_id, "val/before_and_now.json", str(tmp_path))).read_text())
    assert table["columns"] == ["step", "prompt", "before", "now", "score before", "score now"]
    assert table["data"] == [[2, "1 1", "of 0", "of 2", 0.0, 0.5], [4, "1 1", "of 0", "of 4", 0.0, 1.0]]


@pytest.mark.parametrize("place", ["own", "shared"])
def test_run_keeps_own_store_and_avoids_public_directory(tmp_path: Path, place: str) -> None:
    run_dir = tmp_path / "p" / "run"
    run_dir.mkdir(parents=True)
    assert database_of(run_dir) == tmp_path / "p" / "mlflow.db"
    if place == "own":
        (run_dir / "mlflow.db").touch()
    else:
        run_dir.parent.chmod(0o1777)
    assert database_of(run_dir) == run_dir / "mlflow.db"
