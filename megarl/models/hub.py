"""The files of a model: a local directory, or the local copy of a URI or a Hugging Face id."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.models.architecture import Architecture, read_architecture
from megarl.models.fields import Fields
from megarl.models.wrapped import text_config
from megarl.platform.errors import UserError, placed
from megarl.platform.hub import CARD_FILE, matching, small_files, snapshot
from megarl.platform.remote import RemoteDirectory, RemoteFile, remote_directory
from megarl.platform.uri import is_uri, local_path
from megarl.reshard.headers import CONFIG, INDEX, SINGLE, read_index

GENERATION = "generation_config.json"
WEIGHTS = "*.safetensors"

ModelDirectory = Path | RemoteDirectory


def place_of(path: str) -> ModelDirectory:
    """Return the place of a user's path or URI, or for a Hugging Face id a missing local directory. Asks no host.

    Raises:
        UserError: the URI names a file on another host.
    """
    return local_path(path) or remote_directory(path)


def local_directory(path: str, *, with_code: bool = False) -> Path:
    """Return the directory of a local checkpoint, or of the local copy of a URI or a Hugging Face id.

    Copies only data, unless `with_code`. Collective if there are ranks and the path is a URI.

    Raises:
        UserError: there is no such directory, and nothing could be copied.
    """
    directory = local_path(path)
    if directory and directory.is_dir():
        return directory
    if is_uri(path):
        if directory:
            raise UserError(f"no directory {directory}")
        from megarl.distributed.copies import local_copy  # needs torch; the check of a configuration does not

        kind = f"model{' with code' * with_code}"
        return local_copy(path, kind, partial(needed_files, with_code=with_code))
    return snapshot(path, [*small_files(with_code=with_code), WEIGHTS, CARD_FILE])  # the card states the licence


def config_place(path: str) -> ModelDirectory:
    """Return where the `config.json` of a model is; of a Hugging Face id only this file is downloaded.

    Raises:
        UserError: the hub has no such model, or cannot be reached.
    """
    place = place_of(path)
    return snapshot(path, [CONFIG]) if isinstance(place, Path) and not place.is_dir() else place


def needed_files(remote: RemoteDirectory, *, with_code: bool) -> list[str]:
    """Return the files of a model: configuration, tokenizer, and the one kind of weights that is read.

    Raises:
        UserError: there is no `config.json`, or the index lists a file that is not there.
    """
    if CONFIG not in remote.sizes:
        raise UserError(f"{remote} has no {CONFIG}: give a directory in Hugging Face's format")
    small = matching(remote.sizes, small_files(with_code=with_code))
    return sorted({*small, *weight_files(remote)})


def weight_files(remote: RemoteDirectory) -> list[str]:
    """Return the files of weights. Raises UserError if the index lists a missing file."""
    if SINGLE in remote.sizes:
        return [SINGLE]
    if INDEX not in remote.sizes:
        return []
    files = sorted(set(read_index(remote / INDEX).values()))
    missing = [file for file in files if "/" not in file and file not in remote.sizes]
    if missing:
        raise UserError(f"{remote / INDEX} lists {missing[0]}, which is not there")
    return files


def read_config(directory: ModelDirectory, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return the parsed `config.json` of a checkpoint with some fields replaced.

    Of a model of images and text, return that of its text model.

    Raises:
        UserError: as `read_json`, or the text model has an unknown family.
    """
    config = read_json(directory / CONFIG)
    with placed(f"{directory}/"):
        return {**text_config(config), **overrides}


def read_json(file: Path | RemoteFile) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: the file is missing, unreadable, not JSON, nested too deeply or not an object.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except RecursionError:
        raise UserError(f"{file} is nested too deeply: write it again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}; write it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is no JSON object, but a {type(content).__name__}: write it again")
    return content


def read_model(directory: ModelDirectory, overrides: Mapping[str, object]) -> tuple[dict[str, Any], Architecture]:
    """Return the configuration of a checkpoint, overrides applied, and the model that it describes.

    Raises:
        UserError: it cannot be read, or it or `generation_config.json` has an impossible value; names the file.
    """
    config = read_config(directory, overrides)
    with placed(f"{directory}/"):  # the message begins with the name of the file
        architecture = read_architecture(config)
    generation = directory / GENERATION
    if generation.exists():
        declared = Fields.of(read_json(generation))
        try:
            declared.tokens("eos_token_id", architecture.vocab_size)
        except UserError as error:
            raise UserError(f"{generation}: {str(error).removeprefix('config.json: ')}") from error
    return config | {"model_type": architecture.family}, architecture


def stop_token_ids(directory: Path, tokenizer_eos: int | None) -> list[int]:
    """Return every token that ends a response: of generation_config.json, else config.json, and of the tokenizer."""
    ids = set() if tokenizer_eos is None else {tokenizer_eos}
    generation = directory / GENERATION
    config = directory / CONFIG
    declared = read_json(generation).get("eos_token_id") if generation.exists() else None
    if declared is None and config.exists():
        declared = read_config(directory, {}).get("eos_token_id")
    if declared is not None:
        ids.update([declared] if isinstance(declared, int) else declared)
    return sorted(ids)
