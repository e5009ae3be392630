"""The headers of the safetensors files of a Hugging Face directory, read without torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.platform.errors import UserError
from megarl.platform.files import inside
from megarl.platform.remote import RemoteDirectory, RemoteFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTERS = "adapter_model.safetensors"
ADAPTERS_CONFIG = "adapter_config.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that weights may be stored in."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: str  # in the notation of safetensors
    shape: Shape


def has_weights(directory: Path | RemoteDirectory) -> bool:
    """Return whether the directory has a file of weights, or an index of several files."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


@contextmanager
def opened(file: Path, *, framework: str = "np") -> Iterator[Any]:
    """Yield a safetensors file, mapped and not read. Raise UserError with the name of the file if it is damaged."""
    try:
        with safe_open(file, framework=framework) as stored:
            yield stored
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}; copy the file again") from error


def read_index(path: Path | RemoteFile) -> dict[str, str]:
    """Return the file of each tensor, relative to the directory of the index.

    Raises:
        UserError: the content is no index, or lists a file outside of the directory.
    """
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=_distinct)["weight_map"]
        files = {name: str(file) for name, file in weight_map.items()}
        for file in set(files.values()):
            inside(Path(str(path.parent)), file)
        return files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} is no index of weights: {error}") from error


def config_field(directory: Path, key: str) -> object:
    """Return a field of the `config.json` of a directory, None without it. Raises UserError for a damaged file."""
    file = directory / CONFIG
    if not file.exists():
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}; write it again") from error
    return config.get(key) if isinstance(config, dict) else None


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Return every tensor of the files of a checkpoint, also tensors that the index does not list.

    Raises:
        UserError: there are no weights, a file is missing or damaged, it lacks a tensor that the index lists, or there
            are two tensors of one name.
    """
    if (directory / SINGLE).is_file():
        return _tensors_of(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise UserError(f"{directory} has no weights: neither {SINGLE} nor {INDEX} exists")
    index = {name: directory / file for name, file in read_index(directory / INDEX).items()}
    found: dict[str, Stored] = {}
    for file in sorted(set(index.values())):
        if not file.is_file():
            raise UserError(f"{directory / INDEX} lists {file.name}, which does not exist")
        tensors = _tensors_of(file)
        missing = [name for name, other in index.items() if other == file and name not in tensors]
        if missing:
            raise UserError(f"{directory / INDEX} lists {missing[0]} in {file.name}, which lacks it")
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise UserError(f"{twice[0]} is in {found[twice[0]].file} and in {file}: remove it from one of the files")
        found |= tensors
    return found


def _tensors_of(file: Path) -> dict[str, Stored]:
    with opened(file) as stored:
        _check_header(file)
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - `stored` is no mapping
        return {name: Stored(file, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def _check_header(file: Path) -> None:
    """Raise UserError if the header of a file that safetensors accepts lists a tensor twice: the last would count."""
    with file.open("rb") as content:
        num_bytes = int.from_bytes(content.read(8), "little")
        try:
            json.loads(content.read(num_bytes), object_pairs_hook=_distinct)
        except ValueError as error:
            raise UserError(f"{file} cannot be read as safetensors: {error}; write the file again") from error


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the object of JSON pairs. Raise ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it lists {next(name for name in names if names.count(name) > 1)} twice")
    return found
