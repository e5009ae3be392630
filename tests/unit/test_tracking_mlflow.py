"""MLflow: a real SQLite store, read back through MLflow's own client."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megarl.section import flatten
from megarl.tracking.mlflow import RUN_ID_FILE, safe_name
from megarl.tracking.tracker import Tracker, make_tracker

PARAMS = {
    "data": {"train_files": ["a.parquet", "b.parquet"], "seed": 1},
    "trainer": {"project_name": "p", "note": "x" * 7000},
    "many": {f"key_{number}": number for number in range(150)},
}


def tracker(run_dir: Path, **options: Any) -> Tracker:
    arguments: dict[str, Any] = {
        "project": "project",
        "experiment": "run",
        "params": PARAMS,
        "total_steps": 9,
        "is_main": True,
    }
    return make_tracker(["mlflow"], run_dir=run_dir, **(arguments | options))


def client(run_dir: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow.db'}")


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_parameters_metrics_and_tables_can_be_read_back(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    first.log({"actor/pg_loss": 0.5, "val-core/gsm8k/acc/mean@4": 0.25}, step=1)
    first.log({"actor/pg_loss": float("nan")}, step=2)
    first.log({f"many/metric_{number}": 1.0 for number in range(1200)}, step=2)
    first.log_table("val/generations", [{"prompt": "a", "score": 1.0}], step=1)
    first.log_table("val/generations", [{"prompt": "b", "score": 0.0}], step=2)

    # as after a crash: nothing was closed, and the run goes on under the same id
    second = tracker(tmp_path, resume_step=2, params=PARAMS | {"data": {"seed": 2}})
    second.log({"actor/pg_loss": 0.25}, step=3)
    second.close([{"val": 0.5}])

    store = client(tmp_path)
    (run,) = store.search_runs([store.get_experiment_by_name("project").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["data.train_files"] == "['a.parquet', 'b.parquet']"
    assert run.data.params["data.seed"] == "1"
    assert len(run.data.params["trainer.note"]) == 6000
    assert run.data.params["many.key_149"] == "149"
    assert run.data.tags["version.torch"]
    history = store.get_metric_history(run.info.run_id, "actor/pg_loss")
    assert [(point.step, point.value) for point in history if point.step != 2] == [(1, 0.5), (3, 0.25)]
    assert run.data.metrics["val-core/gsm8k/acc/mean_at_4"] == 0.25
    assert sum(name.startswith("many/") for name in run.data.metrics) == 1200

    from mlflow.artifacts import download_artifacts

    table = Path(download_artifacts(f"{run.info.artifact_uri}/val/generations.json")).read_text()
    assert '"b"' in table
    assert Path(download_artifacts(f"{run.info.artifact_uri}/summary.txt")).read_text() == "val=0.5\n"
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())


def killed_at_four(run_dir: Path) -> None:
    """A run whose third step is saved, and which died when it had recorded the fourth."""
    first = tracker(run_dir)
    for step in (1, 2, 3, 4):
        first.log({"actor/pg_loss": step / 10} | ({"val/loss": step / 7} if step % 2 == 0 else {}), step=step)
        first.log_table("val/generations", [{"response": f"of {step}", "score": 1.0}], step=step)


def runs_of(run_dir: Path) -> list[Any]:
    store = client(run_dir)
    return list(store.search_runs([store.get_experiment_by_name("project").experiment_id]))


def history_of(run_dir: Path, run: Any, name: str = "actor/pg_loss") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client(run_dir).get_metric_history(run.info.run_id, name)]


def table_of(run_dir: Path, run: Any, to: Path) -> list[Any]:
    to.mkdir()
    file = client(run_dir).download_artifacts(run.info.run_id, "val/generations.json", str(to))
    table = json.loads(Path(file).read_text())
    assert table["columns"] == ["step", "response", "score"]
    return list(table["data"])


def test_steps_that_are_taken_again_are_recorded_once(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    again = tracker(tmp_path, resume_step=3)
    for step in (4, 5, 6):
        # the fourth step had died between two of its metrics, and before its second table
        again.log_table("val/generations", [{"response": f"of {step}", "score": 1.0}], step=step)
        again.log_table("val/more", [{"response": "more"}], step=step)
        again.log({"actor/pg_loss": step / 10, "val/loss": step / 7, "timing_s/step": 1.0}, step=step)
    again.close()
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert history_of(tmp_path, run) == [(step, step / 10) for step in range(1, 7)]
    assert history_of(tmp_path, run, "val/loss") == [(step, step / 7) for step in (2, 4, 5, 6)]
    assert history_of(tmp_path, run, "timing_s/step") == [(step, 1.0) for step in (4, 5, 6)]
    assert table_of(tmp_path, run, tmp_path / "out") == [[step, f"of {step}", 1.0] for step in range(1, 7)]


def test_steps_that_become_others_are_those_of_another_run(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    again = tracker(tmp_path, resume_step=3, same_curve=False)
    again.log({"actor/pg_loss": 9.0}, step=4)
    third = tracker(tmp_path, resume_step=4, same_curve=False)  # nothing is taken again: the run goes on
    third.log({"actor/pg_loss": 9.5}, step=5)
    histories = sorted(history_of(tmp_path, run) for run in runs_of(tmp_path))
    assert histories == [[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)], [(4, 9.0), (5, 9.5)]]


def test_a_run_that_this_store_does_not_know_begins_anew(tmp_path: Path) -> None:
    (tmp_path / RUN_ID_FILE).write_text("0" * 32)
    tracker(tmp_path, resume_step=3).log({"actor/pg_loss": 0.4}, step=4)
    (run,) = runs_of(tmp_path)
    assert history_of(tmp_path, run) == [(4, 0.4)]


def test_a_step_that_was_saved_and_not_recorded_is_recorded_on_resume(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    for step, metrics in ((4, {"actor/pg_loss": 0.4}), (5, {"actor/pg_loss": 0.5}), (5, {"actor/pg_loss": 0.5})):
        tracker(tmp_path, resume_step=step, resume_metrics=metrics)
    (run,) = runs_of(tmp_path)
    assert history_of(tmp_path, run) == [(step, step / 10) for step in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("uri", ["papyrus://scroll", "sqlite:///{tmp_path}/file/mlflow.db", "http://127.0.0.1:9"])
def test_a_store_that_cannot_be_reached_is_named(uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    uri = uri.format(tmp_path=tmp_path)
    with pytest.raises(ValueError, match=f"trainer.logger: MLflow at {uri} cannot be used"):
        tracker(tmp_path, mlflow_tracking_uri=uri)


def test_a_store_that_fails_later_costs_a_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tracker(tmp_path, params={})
    store = client(tmp_path)
    (run,) = store.search_runs([store.get_experiment_by_name("project").experiment_id])
    store.delete_run(run.info.run_id)
    with caplog.at_level(logging.WARNING):
        first.log({"actor/pg_loss": 0.5}, step=1)
    assert "MLflow took no record, training goes on" in caplog.text


def test_names_are_safe_by_construction() -> None:
    assert safe_name("val-core/openai/gsm8k/acc/mean@4") == "val-core/openai/gsm8k/acc/mean_at_4"
    assert safe_name("reward (é)%") == "reward ____"
    assert safe_name("val/test_score/../../x//./y.z/") == "val/test_score/_/_/x/_/_/y.z/_"


def test_flatten_by_hand() -> None:
    assert dict(flatten({"a": {"b": 1, "c": {"d": None}}, "e": {}, "f": [1]})) == {
        "a.b": 1,
        "a.c.d": None,
        "e": {},
        "f": [1],
    }
