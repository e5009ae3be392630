"""MLflow: a real SQLite store and a real server, read back through MLflow's own client."""

import json
import logging
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megarl.platform.safe_names import mlflow_key
from megarl.section import flatten
from megarl.tracking import mlflow_store
from megarl.tracking.jsonl import METRICS_FILE, read_jsonl, table_file, values_of
from megarl.tracking.protocol import Tracker
from megarl.tracking.run import TrackedRun
from megarl.tracking.run_id import RUN_ID_FILE
from tests.support.http_server import LocalServer, QuietHandler, serving
from tests.support.mlflow_server import Server, wait_for
from tests.support.trackers import mlflow_client as client
from tests.support.trackers import tracker_of

PARAMS = {
    "data": {"train_files": ["a.parquet", "b.parquet"], "seed": 1},
    "trainer": {"project_name": "p", "note": "x" * 7000},
    "many": {f"key_{number}": number for number in range(150)},
}


def tracker(root: Path, **options: Any) -> Tracker:
    """Return the tracker of the run of the project in `root`."""
    return tracker_of("mlflow", root / "run", **{"project": "project", "experiment": "run", "params": PARAMS} | options)


def little_run(run_dir: Path, **options: Any) -> TrackedRun:
    """Return the run of an experiment `p`."""
    return TrackedRun(**{"run_dir": run_dir, "project": "p", "experiment": "e", "params": {"a": 1}} | options)


def sent(root: Path, store: Any = None) -> None:
    """Wait until the store has the metrics and the table of the last step of the run in `root`."""
    store, run_dir = store or client(root), root / "run"
    line, table = read_jsonl(run_dir / METRICS_FILE)[-1], run_dir / table_file("val/generations")
    has_table = table.exists() and read_jsonl(table)[-1]["step"] == line["step"]

    def is_sent() -> bool:
        if not (run_dir / RUN_ID_FILE).exists():
            return False
        run_id = (run_dir / RUN_ID_FILE).read_text()
        last = {metric.key: metric.step for metric in store.get_run(run_id).data.to_proto().metrics}
        if any(last.get(mlflow_key(name), -1) < line["step"] for name in values_of(line)):
            return False
        return not has_table or step_of_table(store, run_id, "val/generations") == line["step"]

    wait_for(is_sent)


def step_of_table(store: Any, run_id: str, name: str) -> int:
    """Return the last step of a table in a store."""
    file = f"{name}.json"
    if file not in [found.path for found in store.list_artifacts(run_id, name.rpartition("/")[0])]:
        return -1
    with TemporaryDirectory() as scratch:
        return int(json.loads(Path(store.download_artifacts(run_id, file, scratch)).read_text())["data"][-1][0])


@contextmanager
def answering(code: int) -> Iterator[str]:
    """A server that responds to everything with one code."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with serving(LocalServer(Handler)) as server:
        yield server.address


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

    sent(tmp_path)

    # as after a crash: nothing was closed, and the run continues with the same id
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
    assert [row[:2] for row in json.loads(table)["data"]] == [[1, "a"], [2, "b"]]
    assert Path(download_artifacts(f"{run.info.artifact_uri}/summary.txt")).read_text() == "val=0.5\n"
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())


def test_the_database_of_a_run_appears_whole(tmp_path: Path) -> None:
    from megarl.tracking.mlflow_place import create_database

    database = tmp_path / "mlflow.db"
    sizes = []
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(create_database, database)
        while not creation.done():
            sizes += [path.stat().st_size for path in tmp_path.glob("mlflow.db")]
            time.sleep(0.001)
    creation.result()
    assert {*sizes} <= {database.stat().st_size}
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    assert client(tmp_path).search_experiments()


def killed_at_four(run_dir: Path) -> None:
    """A run with a checkpoint of step 3 that died after it had recorded step 4."""
    first = tracker(run_dir)
    for step in (1, 2, 3, 4):
        first.log({"actor/pg_loss": step / 10} | ({"val/loss": step / 7} if step % 2 == 0 else {}), step=step)
        first.log_table("val/generations", [{"response": f"of {step}", "score": 1.0}], step=step)
    sent(run_dir)


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
        # the run died between two metrics of step 4, before its second table
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


def test_changed_curve_on_resume_starts_new_mlflow_run(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    again = tracker(tmp_path, resume_step=3, same_curve=False)
    again.log({"actor/pg_loss": 9.0}, step=4)
    sent(tmp_path)
    third = tracker(tmp_path, resume_step=4, same_curve=False)  # no step is repeated: the run continues
    third.log({"actor/pg_loss": 9.5}, step=5)
    sent(tmp_path)
    histories = sorted(history_of(tmp_path, run) for run in runs_of(tmp_path))
    assert histories == [[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)], [(4, 9.0), (5, 9.5)]]


def test_mlflow_run_unknown_to_store_starts_new_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_ID_FILE).write_text("0" * 32)
    tracker(tmp_path, resume_step=3).log({"actor/pg_loss": 0.4}, step=4)
    sent(tmp_path)
    (run,) = runs_of(tmp_path)
    assert history_of(tmp_path, run) == [(4, 0.4)]


def test_a_run_that_was_deleted_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed_at_four(tmp_path)
    (run,) = runs_of(tmp_path)
    client(tmp_path).delete_run(run.info.run_id)
    tracker(tmp_path, resume_step=4).log({"actor/pg_loss": 0.5}, step=5)
    sent(tmp_path)
    (new,) = runs_of(tmp_path)
    assert history_of(tmp_path, new) == [(5, 0.5)]
    assert caplog.text.count(f"MLflow does not know the run {run.info.run_id}, or it was deleted there") == 1


def test_new_mlflow_run_is_complete_after_failed_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megarl.tracking.mlflow_store import FAILURES, Store

    killed_at_four(tmp_path)
    id_file = tmp_path / "run" / RUN_ID_FILE
    old = id_file.read_text()
    run = little_run(tmp_path / "run", project="project", resume_step=3, same_curve=False)
    store = Store(f"sqlite:///{tmp_path / 'mlflow.db'}", run, None)
    with closing(sqlite3.connect(tmp_path / "mlflow.db", timeout=60)) as database:
        condition = "BEFORE INSERT ON tags WHEN NEW.key = 'mlflow.note.content'"
        database.execute(f"CREATE TRIGGER no {condition} BEGIN SELECT RAISE(ABORT, 'not now'); END")
        for _ in range(2):
            with pytest.raises(FAILURES, match="not now"):
                store.begin()
            store.forget()
            assert id_file.read_text() == old
        database.execute("DROP TRIGGER no")
    store.begin()
    (new,) = [run for run in runs_of(tmp_path) if run.info.run_id != old]
    assert new.data.params == {"a": "1"}
    assert id_file.read_text() == new.info.run_id
    assert caplog.text.count("a new one begins") == 1


def test_mlflow_added_on_resume_gets_complete_curve(tmp_path: Path) -> None:
    files = tracker_of("jsonl", tmp_path / "run")
    for step in (1, 2):
        files.log({"actor/pg_loss": step / 10}, step=step)
    files.log_table("val/generations", [{"response": "of 2", "score": 1.0}], step=2)
    tracker(tmp_path, resume_step=2).close()
    (run,) = runs_of(tmp_path)
    assert history_of(tmp_path, run) == [(1, 0.1), (2, 0.2)]
    assert table_of(tmp_path, run, tmp_path / "out") == [[2, "of 2", 1.0]]


def test_resume_continues_new_run_unknown_to_any_server(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    with answering(503) as uri:
        away = tracker(tmp_path, mlflow_tracking_uri=uri)
        away.log({"actor/pg_loss": 7.0}, step=1)
        away.close()
    again = tracker(tmp_path, resume_step=1)
    again.log({"actor/pg_loss": 8.0}, step=2)
    again.close()
    histories = sorted(history_of(tmp_path, run) for run in runs_of(tmp_path))
    assert histories == [[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)], [(1, 7.0), (2, 8.0)]]


def test_saved_step_without_record_is_recorded_on_resume(tmp_path: Path) -> None:
    killed_at_four(tmp_path)
    for step, metrics in ((4, {"actor/pg_loss": 0.4}), (5, {"actor/pg_loss": 0.5}), (5, {"actor/pg_loss": 0.5})):
        tracker(tmp_path, resume_step=step, resume_metrics=metrics)
        sent(tmp_path)
    (run,) = runs_of(tmp_path)
    assert history_of(tmp_path, run) == [(step, step / 10) for step in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("uri", ["papyrus://scroll", "sqlite:///{tmp_path}/file/mlflow.db", "http://.x"])
def test_a_store_that_cannot_be_used_is_named(uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    uri = uri.format(tmp_path=tmp_path)
    with pytest.raises(ValueError, match=f"trainer.logger: MLflow at {re.escape(uri)} cannot be used"):
        tracker(tmp_path, mlflow_tracking_uri=uri)


def test_refused_record_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tracker(tmp_path, params={})
    store = client(tmp_path)
    (run,) = store.search_runs([store.get_experiment_by_name("project").experiment_id])
    store.delete_run(run.info.run_id)
    with caplog.at_level(logging.WARNING):
        first.log({"actor/pg_loss": 0.5}, step=1)
        first.close()
    assert "MLflow refused a record, training continues" in caplog.text
    assert "lacks" not in caplog.text


@pytest.mark.parametrize("code", [401, 503])
def test_refused_login_stops_run_unlike_unready_server(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(code) as uri:
        if code == 401:
            with pytest.raises(ValueError, match=f"trainer.logger: MLflow at {uri} cannot be used"):
                tracker(tmp_path, mlflow_tracking_uri=uri)
            return
        waiting = tracker(tmp_path, mlflow_tracking_uri=uri)
        waiting.log({"loss": 0.5}, step=1)
        waiting.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / METRICS_FILE)] == [1]
    said = f"MLflow at {uri} lacks the last records, 1 lines of metrics among them: they are in {tmp_path / 'run'}"
    assert said in caplog.text


@pytest.mark.timeout(1200)  # a server starts twice, which takes long on a machine that is busy
def test_intermittent_server_gets_every_record_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    crashed, run_dir = tmp_path / "crashed", tmp_path / "run"
    first = tracker(crashed, mlflow_tracking_uri=server.uri)
    for step in (1, 2, 3):
        first.log({"loss": step / 10}, step=step)
        first.log_table("samples", [{"text": f"of {step}"}], step=step)
    shutil.copytree(crashed, run_dir)  # the state after a machine failure
    first.close()

    caplog.clear()
    second = tracker(run_dir, mlflow_tracking_uri=server.uri, resume_step=2)
    second.log({"loss": 30.0}, step=3)
    rows = read_jsonl(run_dir / "run" / METRICS_FILE)
    times = {row["step"]: int(1000 * row["time"]) for row in rows}
    assert sorted(times) == [1, 2, 3]
    with server.running():
        sent(run_dir, server.client())  # during the run
    second.log({"loss": 0.4}, step=4)
    second.log_table("samples", [{"text": "of 4"}], step=4)
    with server.running():
        second.close([{"val": 0.5}])
        assert "lacks" not in caplog.text

        store = server.client()
        (run,) = store.search_runs([store.get_experiment_by_name("project").experiment_id])
        assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
        assert run.data.params["many.key_149"] == "149"
        assert run.data.tags["version.torch"]
        history = store.get_metric_history(run.info.run_id, "loss")
        assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 30.0), (4, 0.4)]
        assert {point.step: point.timestamp for point in history if point.step < 4} == times
        table = store.download_artifacts(run.info.run_id, "samples.json", str(tmp_path))
        assert json.loads(Path(table).read_text())["data"] == [[step, f"of {step}"] for step in (1, 2, 4)]


def test_record_with_lost_reply_is_not_duplicated(tmp_path: Path) -> None:
    from megarl.tracking.mlflow_store import Store

    tracker(tmp_path, params={}).close()
    uri, artifacts = f"sqlite:///{tmp_path / 'mlflow.db'}", (tmp_path / "files").as_uri()
    store, made = Store(uri, little_run(tmp_path), artifacts), time.time()
    for _ in range(2):
        store.begin()
        store.log_metrics([{"step": 1, "time": 0.007, "loss": 0.5}])
        store.forget()
        store.log_table("t", [{"step": 1, "text": "a"}, {"step": 1, "text": "b"}])
        store.forget()
    seen = client(tmp_path)
    (run,) = seen.search_runs([seen.get_experiment_by_name("p").experiment_id])
    assert run.info.start_time <= 1000 * made
    (point,) = seen.get_metric_history(run.info.run_id, "loss")
    assert (point.step, point.timestamp) == (1, 7)
    table = seen.download_artifacts(run.info.run_id, "t.json", str(tmp_path))
    assert json.loads(Path(table).read_text())["data"] == [[1, "a"], [1, "b"]]


def test_names_of_all_kinds_are_kept_apart(tmp_path: Path) -> None:
    names = [
        "acc",
        "Acc",
        "ACC",
        "acc ",
        "數學",
        "数学",
        "a@b",
        "a_at_b",
        "x" * 272,
        "x" * 271,
        "..",
        "a//b",
        "a/b",
        "é",
    ]
    names += ["e\u0301", "\ud800", "\udfff", "\u202eb", "", " ", "\0", "%", "a\nb"]
    keys = {"a": {"b": 1}, "a.b": 2, "A.B": 3, "k" * 300: 4, "數": 5, "é": 6}
    first = tracker(tmp_path, params=keys, project="p" * 600, experiment="數" * 600)
    first.log({name: float(place) for place, name in enumerate(names)}, step=1)
    first.close()
    again = tracker(tmp_path, params=keys, project="p" * 600, experiment="數" * 600, resume_step=1)
    again.log({name: float(-place) for place, name in enumerate(reversed(names), start=1)}, step=2)
    again.close()
    store = client(tmp_path)
    (run,) = store.search_runs([each.experiment_id for each in store.search_experiments()])
    assert sorted(run.data.params.values()) == ["1", "2", "3", "4", "5", "6"]
    histories = [store.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
    seen = {tuple(point.value for point in sorted(points, key=lambda point: point.step)) for points in histories}
    assert seen == {(float(place), float(place - len(names))) for place in range(len(names))}
    assert len({key.casefold() for key in run.data.metrics}) == len(names)


def test_what_the_store_refuses_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl.tracking.mlflow_store import Store

    for module in ("mlflow_store", "mlflow_inputs"):  # otherwise the names would become acceptable
        monkeypatch.setattr(f"megarl.tracking.{module}.mlflow_key", str)
    tracker(tmp_path, params={}).close()
    run = little_run(tmp_path, params={f"p{number}": 1 for number in range(5)} | {"%": 1})
    store = Store(f"sqlite:///{tmp_path / 'mlflow.db'}", run, None)
    store.begin()
    for step in (1, 2):
        values = {f"m{number}": 0.5 for number in range(9)} | {"y" * 251: 1.0, "../x": 2.0}
        store.log_metrics([{"step": step, "time": 7, **values}])
    seen = client(tmp_path)
    (run,) = seen.search_runs([seen.get_experiment_by_name("p").experiment_id])
    assert run.data.params.keys() == {f"p{number}" for number in range(5)}
    assert run.data.metrics.keys() == {f"m{number}" for number in range(9)}
    assert [len(seen.get_metric_history(run.info.run_id, name)) for name in run.data.metrics] == [2] * 9
    assert [message.split(",")[0] for message in caplog.messages] == [
        "MLflow refuses % of params",
        f"MLflow refuses {'y' * 251} of metrics",
        "MLflow refuses ../x of metrics",
    ]


def test_flatten_by_hand() -> None:
    assert dict(flatten({"a": {"b": 1, "c": {"d": None}}, "e": {}, "f": [1]})) == {
        "a.b": 1,
        "a.c.d": None,
        "e": {},
        "f": [1],
    }


def test_host_metrics_can_be_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    before = {*threading.enumerate()}
    opened = tracker(tmp_path)
    assert "SystemMetricsMonitor" not in [thread.name for thread in {*threading.enumerate()} - before]
    opened.close()


def test_host_metrics_fill_their_tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_store, "SAMPLED_S", 0.1)
    name = "system/cpu_utilization_percentage"

    def samples() -> list[int]:
        experiment = client(tmp_path).get_experiment_by_name("project")
        [run] = client(tmp_path).search_runs([experiment.experiment_id])
        return [metric.step for metric in client(tmp_path).get_metric_history(run.info.run_id, name)]

    first = tracker(tmp_path)
    first.log({"loss": 1.0}, step=1)
    wait_for(lambda: len(samples()) > 5)
    first.close(ending="stopped")
    before = len(samples())
    # The steps of the samples exceed that of the checkpoint, and are none of the run's.
    second = tracker(tmp_path, resume_step=1, same_curve=False)
    wait_for(lambda: len(samples()) > before + 5)
    second.close()
    assert samples() == list(range(len(samples())))
