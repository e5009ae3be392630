"""Results of runs in files, and a comparison of two runs that should be the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from mlflow import MlflowClient

from megarl.checkpoint.contents import RANDOM_STATES
from megarl.samples.store import PLACE
from megarl.tracking.jsonl import read_jsonl
from scripts.metrics import describe

PASSING = ("time", "timing_s/", "perf/", "sync/check", "reward/slowest_s")
"""Prefixes of metrics that differ between equal runs: those of the clock, and of the checks when a run starts."""
LINE = {"step", "time"}  # keys of a line that are no metrics
PARTS = ("actor", "critic")  # of a checkpoint: weights, optimizers, schedules
INDEX = ".metadata"  # of the files of a part; torch gives every save an id of its own


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step except PASSING."""
    lines = read_jsonl(run_dir / "metrics.jsonl")
    assert len({line["step"] for line in lines}) == len(lines)
    assert [name for name in {name for line in lines for name in line} - LINE if describe(name) is None] == []
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(PASSING)} for line in lines}


def differences(expected: Path, found: Path, *, step: int) -> list[str]:
    """Return how two run directories differ in metrics, samples (in `samples/`) and models after `step` steps."""
    said, metrics, others = [], metrics_of(expected), metrics_of(found)
    if list(metrics) != list(others):
        said.append(f"there are metrics of steps {list(others)}, not {list(metrics)}")
    for number in sorted(metrics.keys() & others.keys()):
        here, there = metrics[number], others[number]
        odd = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
        said += [f"step {number}: {name} is {there.get(name)}, not {here.get(name)}" for name in odd]
    for place in ("samples", *(f"global_step_{step}/{part}" for part in PARTS)):
        mine, theirs = ({path.name for path in (run / place).iterdir()} - {INDEX} for run in (expected, found))
        if mine != theirs:
            said.append(f"{place} holds {sorted(theirs)}, not {sorted(mine)}")
        for name in sorted(mine & theirs):
            if not _same(expected / place / name, found / place / name):
                said.append(f"{place}/{name} is another")
    generators = f"global_step_{step}/{RANDOM_STATES}"
    if not _same(expected / generators, found / generators):
        said.append(f"{generators} is another")
    return said


def samples_in(path: Path) -> Any:
    """Return the table of the samples that a run kept in a file, or in a directory of parts, in their order."""
    table = pq.read_table(path)
    return table.sort_by(PLACE).drop_columns([PLACE]) if PLACE in table.column_names else table


def _same(mine: Path, other: Path) -> bool:
    if mine.suffix == ".parquet":
        return bool(samples_in(mine).equals(samples_in(other)))
    return mine.read_bytes() == other.read_bytes()


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """Yield W&B's offline records of all parts of a run in the order of `wandb sync`."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        store = DataStore()
        store.open_for_scan(str(file))
        while data := store.scan_data():
            record = Record()
            record.ParseFromString(data)
            yield record


def wandb_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics that W&B recorded offline, a row per step."""
    rows = [record.history for record in wandb_records(run_dir) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def mlflow_runs(run_dir: Path, project: str = "megarl_examples") -> tuple[MlflowClient, list[Any]]:
    """Return a client of the MLflow store of a run's project, and the runs of the project in that directory."""
    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(project)
    where = f"tags.`megarl.run_dir` = '{run_dir.resolve()}'"
    return client, client.search_runs([experiment.experiment_id], where)
