"""Facts about a model before any library is imported: its files and its sizes."""

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.faults import Fault
from megarl.data.remote_tokenizer import RemoteTokenizer, is_without_tokenizer
from megarl.models.architecture import Architecture
from megarl.models.claims import weight_faults
from megarl.models.config import CheckpointSection, ModelSection
from megarl.models.hub import ModelDirectory, place_of, read_config, read_model, weight_files
from megarl.models.overrides import unread_overrides
from megarl.platform.errors import UserError
from megarl.platform.files import similar
from megarl.platform.hub import is_hub_model
from megarl.platform.remote import RemoteDirectory, remote_directory
from megarl.platform.uri import is_uri, local_path
from megarl.reshard.headers import ADAPTERS_CONFIG, CONFIG, has_weights

_HF_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_sizes(model: CheckpointSection) -> Architecture | None:
    """Return the sizes of a model with `override_config` applied; None if they are not known yet.

    The `config.json` of a model at a URI is read once.
    """
    try:
        return read_model(place_of(model.path), model.override_config)[1]
    except UserError:
        return None  # `model_faults` reports the fault


def model_faults(
    model: CheckpointSection, key: str, *, needs_weights: bool = True, needs_head: bool = True
) -> Iterator[Fault]:
    """Yield the missing and the damaged parts of the model that `key` names; the hub checks a Hugging Face id.

    With `needs_head` an output layer for tokens must exist if config.json has one.
    """
    if not model.path:
        return
    try:
        place = place_of(model.path)
        if isinstance(place, Path) and not place.exists():
            is_id = _HF_ID.fullmatch(model.path) and not model.path.startswith(".")
            if not is_id and not is_hub_model(model.path):
                remedy = similar(place) or ": give a HF directory, its URI or a HF id"
                yield Fault(key, f"no directory {model.path}{remedy}")
        elif not (place / CONFIG).is_file():
            yield Fault(key, f"{place} has no {CONFIG}: give a directory in Hugging Face's format")
        else:
            overrides = list(unread_overrides(read_config(place, {}), model.override_config))
            for fault in overrides:
                yield Fault(f"{key.removesuffix('path')}override_config", fault)
            if overrides:
                return
            for fault in _place_faults(place, model, needs_weights=needs_weights, needs_head=needs_head):
                yield Fault(key, fault)
    except UserError as error:
        yield Fault(key, str(error))
    if isinstance(model, ModelSection):
        section = key.removesuffix("path")
        sizes = read_sizes(model) if model.freeze_moe_router else None
        if sizes and not sizes.experts:
            yield Fault(f"{section}freeze_moe_router", f"{key} has no experts: leave it out")
        if model.lora_adapter_path:
            yield from _adapter_faults(model.lora_adapter_path, f"{section}lora_adapter_path")


def _adapter_faults(path: str, key: str) -> Iterator[Fault]:
    """Yield why there are no adapters at a path."""
    if not (Path(path) / ADAPTERS_CONFIG).is_file():
        remedy = similar(Path(path)) if not Path(path).exists() else ""
        yield Fault(key, f"{path} has no {ADAPTERS_CONFIG}{remedy or ': name a directory that PEFT has written'}")


def _place_faults(
    place: ModelDirectory, model: CheckpointSection, *, needs_weights: bool, needs_head: bool
) -> Iterator[str]:
    if needs_weights and not has_weights(place):
        has_pickles = isinstance(place, Path) and any(place.glob("*.bin"))
        remedy = "convert them with transformers' save_pretrained" if has_pickles else "add them"
        yield f"{place} has no weights (*.safetensors): {remedy}"
    _, architecture = read_model(place, model.override_config)
    if isinstance(place, RemoteDirectory):
        weight_files(place)
    elif has_weights(place):
        yield from weight_faults(place, architecture, needs_head=needs_head)


def tokenizer_faults(path: str | None, key: str, remedy: str) -> Iterator[Fault]:
    """Yield why there is no tokenizer at a local path or a URI; the hub checks a Hugging Face id."""
    if not path:
        return
    is_place = is_uri(path) or path.startswith(("/", ".")) or Path(path).exists()
    if not is_place:
        return
    try:
        place = local_path(path)
        if place and not place.exists():
            raise UserError(f"no such file: {path}: {remedy}")
        if place and is_without_tokenizer(place):
            raise UserError(f"{path} has no tokenizer: {remedy}")
        if not place:
            remote = RemoteTokenizer.at(path)
            remote.files(remote_directory(remote.directory), with_code=False)
    except UserError as error:
        yield Fault(key, str(error))
