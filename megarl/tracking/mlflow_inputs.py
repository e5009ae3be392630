"""The parameters and tags of a run in MLflow, and its data and model as MLflow's own entities, which its pages link."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, LoggedModelStatus, Run
from mlflow.exceptions import MlflowException

from megarl.platform.safe_names import MLFLOW_LONGEST, mlflow_key, with_digest
from megarl.platform.terminal import shortened
from megarl.platform.versions import versions
from megarl.section import flatten
from megarl.tracking.history import origin
from megarl.tracking.run import TrackedRun

logger = logging.getLogger(__name__)

CONTEXT_TAG = "mlflow.data.context"
MAX_NAME = 200
MAX_VALUE_CHARACTERS = 6000  # the limit of MLflow's stores
MAX_SHOWN_CHARACTERS = 2000  # of the command, in a tag
_CONTEXTS = {"train_files": "training", "val_files": "validation"}


def params_of(params: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the parameters of a run. Their keys differ by more than their case, because some stores ignore it."""
    shown = dict[str, tuple[str, str]]()  # by the casefolded key
    for number, (name, value) in enumerate(flatten(params)):
        key = mlflow_key(name)
        if key.casefold() in shown:
            key = with_digest(key, f"{number} {name}")
        shown[key.casefold()] = (key, shortened(str(value), MAX_VALUE_CHARACTERS))
    return list(shown.values())


def tags_of(run: TrackedRun) -> dict[str, str]:
    """Return the tags of a run: description, command, user, directory, commit, and versions of packages."""
    facts = origin()
    where = f"`{run.run_dir.resolve()}` on {facts['host']}"
    command = shortened(facts["command"], MAX_SHOWN_CHARACTERS)
    tags = {
        "mlflow.note.content": f"{where}\n\n```\n{command}\n```\n\nThe artifact report.html sums the run up.",
        "mlflow.source.name": shortened(_short(facts["command"]), MLFLOW_LONGEST),
        "mlflow.source.type": "LOCAL",
        "mlflow.user": shortened(facts["user"], MLFLOW_LONGEST),
        "megarl.run_dir": str(run.run_dir.resolve()),
    }
    tags |= {"mlflow.source.git.commit": facts["commit"]} if "commit" in facts else {}
    return tags | {f"version.{name}": version for name, version in versions().items()}


def _short(command: str) -> str:
    """Return a command without directories and keys: MLflow shows what follows the last slash."""
    return " ".join(Path(word).name for word in command.split() if "=" not in word)


def _data_of(params: Mapping[str, Any]) -> Iterator[DatasetInput]:
    """Yield the files that a configuration names under `data`."""
    for key, context in _CONTEXTS.items():
        found = params.get("data", {}).get(key) or []
        paths = [found] if isinstance(found, str) else list(map(str, found))
        if paths:
            name = ", ".join(path.rpartition("/")[2] for path in paths)[:MAX_NAME]
            files = Dataset(name, _digest(paths), "local", json.dumps({"uri": paths}))
            yield DatasetInput(files, [InputTag(CONTEXT_TAG, context)])


def log_inputs(client: MlflowClient, run: Run, params: Mapping[str, object]) -> None:
    """Give a run its data and its model, unless it has them. A server that knows neither costs a warning."""
    run_id = run.info.run_id
    datasets = list(_data_of(params))
    flat = dict(flatten(params))
    model = flat.get("actor_rollout_ref.model.path") or flat.get("model.path")
    try:
        if datasets:
            client.log_inputs(run_id, datasets)
        known = client.get_run(run_id).inputs
        has_model = known and known.model_inputs
        if model and not has_model:
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
