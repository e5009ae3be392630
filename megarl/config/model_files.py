"""What can be known of a model before any library is imported: whether its files are there, and its sizes."""

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.faults import Fault
from megarl.learner.config import CheckpointSection
from megarl.models.architecture import Architecture
from megarl.models.claims import weight_faults
from megarl.models.hub import read_model
from megarl.reshard.headers import has_weights

_HF_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_sizes(model: CheckpointSection) -> Architecture | None:
    """Return the sizes of a local model with `override_config` applied; None where they cannot be known yet."""
    try:
        return read_model(Path(model.path), model.override_config)[1]
    except ValueError:
        return None  # `model_faults` says what is wrong with a local directory


def model_faults(
    model: CheckpointSection, key: str, *, needs_weights: bool = True, needs_head: bool = True
) -> Iterator[Fault]:
    """Yield what is missing of the model that `key` names, or damaged; a HF id is left to the hub.

    `needs_head` says whether an output layer for tokens must be there where config.json speaks of it.
    """
    directory = Path(model.path)
    if not model.path:
        return
    if not directory.exists():
        if not _HF_ID.fullmatch(model.path) or model.path.startswith("."):
            yield Fault(path=key, message=f"no directory {model.path}: give a HF directory or a HF id (org/name)")
    elif not (directory / "config.json").is_file():
        yield Fault(path=key, message=f"{model.path} has no config.json: give a directory in Hugging Face's format")
    else:
        if needs_weights and not has_weights(directory):
            remedy = "convert them with transformers' save_pretrained" if any(directory.glob("*.bin")) else "add them"
            yield Fault(path=key, message=f"{model.path} has no weights (*.safetensors): {remedy}")
        try:
            _, architecture = read_model(directory, model.override_config)
        except ValueError as fault:
            yield Fault(path=key, message=str(fault))
            return
        if has_weights(directory):
            for said in weight_faults(directory, architecture, needs_head=needs_head):
                yield Fault(path=key, message=said)
