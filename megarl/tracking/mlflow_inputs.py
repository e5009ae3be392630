"""The data and the model of a run, as MLflow's own entities: its pages list and link them."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, LoggedModelStatus
from mlflow.exceptions import MlflowException

from megarl.tracking.records import DataFiles

logger = logging.getLogger(__name__)

CONTEXT_TAG = "mlflow.data.context"
MAX_NAME = 200
_CONTEXTS = {"train_files": "training", "val_files": "validation"}
_MODELS = (("actor_rollout_ref", "model", "path"), ("model", "path"))  # of the model that learns


def data_of(params: Mapping[str, Any]) -> Iterator[DataFiles]:
    """Yield the files that a configuration names under `data`."""
    for key, context in _CONTEXTS.items():
        found = params.get("data", {}).get(key) or []
        paths = [found] if isinstance(found, str) else list(map(str, found))
        if paths:
            name = ", ".join(path.rpartition("/")[2] for path in paths)[:MAX_NAME]
            yield {"name": name, "digest": _digest(paths), "context": context, "paths": paths}


def model_of(params: Mapping[str, Any]) -> str | None:
    """Return the path of the model that learns."""
    for keys in _MODELS:
        node: Any = params
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        if isinstance(node, str):
            return node
    return None


def log_inputs(client: MlflowClient, run: Any, data: Sequence[DataFiles], model: str | None) -> None:
    """Give a run its data and its model, unless it has them. A server that knows neither costs a warning."""
    run_id = run.info.run_id
    datasets = [
        DatasetInput(
            Dataset(each["name"], each["digest"], "local", json.dumps({"uri": each["paths"]})),
            [InputTag(CONTEXT_TAG, each["context"])],
        )
        for each in data
    ]
    try:
        if datasets:
            client.log_inputs(run_id, datasets)
        known = client.get_run(run_id).inputs
        if model and not (known and known.model_inputs):
            name = Path(model.rstrip("/")).name.replace(":", "_") or "model"
            logged = client.create_logged_model(run.info.experiment_id, name, run_id, tags={"path": model})
            client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
            client.log_inputs(run_id, models=[LoggedModelInput(logged.model_id)])
    except MlflowException as error:
        if error.get_http_status_code() not in (400, 404, 501):
            raise
        logger.warning("MLflow does not list the data and the model of the run: %s", error)


def _digest(paths: Sequence[str]) -> str:
    """Return a digest of the paths, and of the sizes and times of those that are local."""
    digest = hashlib.blake2b(digest_size=4)
    for path in paths:
        digest.update(path.encode(errors="replace"))
        if Path(path).is_file():
            stat = Path(path).stat()
            digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()
