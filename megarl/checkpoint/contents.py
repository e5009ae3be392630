"""The small files of a checkpoint, and the check whether a checkpoint is intact.

global_step_40/state.json      the state of the run except its models (`State`)
              /config.yaml     its configuration
              /code.json       the user's own code, as digests
              /inputs.json     the files that it reads, by size and checksum
              /versions.json   the packages that matter
              /models.json     the sizes of its models
              /random_states.pt  the generators of each rank
              /mlflow_run_id   its run in MLflow
              /wandb_run_id    its run in W&B
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megarl.checkpoint.directory import CONFIG_FILE
from megarl.checkpoint.manifest import find_altered
from megarl.checkpoint.state import State
from megarl.distributed.exchange import on_first_rank
from megarl.learner.checkpoint import check_files
from megarl.learner.randomness import read_random_states
from megarl.platform.files import inside
from megarl.platform.small_files import Damage, naming, read_json, read_text
from megarl.tracking.run_id import RUN_ID_FILES, read_run_id

T = TypeVar("T")
RunConfig = Mapping[str, Any]
"""The configuration of a run, nested."""

VERSIONS_FILE = "versions.json"
MODELS_FILE = "models.json"
CODE_FILE = "code.json"
INPUTS_FILE = "inputs.json"
HUGGINGFACE_FILES = ("huggingface/config.json", "huggingface/model.safetensors.index.json")
RANDOM_STATES = "random_states.pt"
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The content of the small files of a checkpoint. None: the run did not write that file."""

    state: State
    config: RunConfig | None
    code: Mapping[str, str] | None
    inputs: Mapping[str, Mapping[str, str]] | None  # by the key of the configuration and the name of the file
    versions: Mapping[str, str] | None
    models: Mapping[str, dict[str, object]] | None
    run_ids: Mapping[str, str]  # by the name of the file

    @classmethod
    def read(cls, checkpoint: Path) -> "Contents":
        """Read every small file. Raises Damage, which names the first file that cannot be read."""
        run_ids = {name: read_run_id(checkpoint / name) for name in RUN_ID_FILES}
        return cls(
            state=State.read(checkpoint),
            config=_read_config(checkpoint / CONFIG_FILE),
            code=_read_optional(checkpoint / CODE_FILE, dict[str, str]),
            inputs=_read_optional(checkpoint / INPUTS_FILE, dict[str, dict[str, str]]),
            versions=_read_optional(checkpoint / VERSIONS_FILE, dict[str, str]),
            models=_read_optional(checkpoint / MODELS_FILE, dict[str, dict[str, object]]),
            run_ids={name: found for name, found in run_ids.items() if found},
        )


def find_damage(checkpoint: Path) -> str | None:
    """Describe the first file of a checkpoint that is damaged; None if the checkpoint is intact. Collective."""
    altered = find_altered(checkpoint)
    if altered:
        return altered
    try:
        on_first_rank(lambda: _check_small_files(checkpoint))
    except Damage as damage:
        return str(damage)
    return None


def _check_small_files(checkpoint: Path) -> None:
    for name in Contents.read(checkpoint).models or ():
        with naming(checkpoint / MODELS_FILE):
            directory = inside(checkpoint, name)
        check_files(directory)
    for name in HUGGINGFACE_FILES:
        _read_optional(checkpoint / name, dict[str, object])
    read_random_states(checkpoint / RANDOM_STATES)


def _read_optional(path: Path, shape: type[T]) -> T | None:
    return read_json(path, shape) if os.path.lexists(path) else None


def _read_config(path: Path) -> RunConfig | None:
    if not os.path.lexists(path):
        return None
    text = read_text(path, max_bytes=MAX_CONFIG_BYTES)
    try:
        found = yaml.load(text, Loader=_WithoutAliases)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Damage.in_content(path, " ".join(str(error).split())[:200]) from error
    if not isinstance(found, dict):
        raise Damage.in_content(path, "it has no keys and values")
    return found


class _WithoutAliases(yaml.SafeLoader):
    """Refuses aliases: no configuration has any, and a few lines of them can fill the memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)
