"""What the safetensors files of a Hugging Face directory say that they hold: headers alone, and without torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.platform.files import inside
from megarl.platform.remote import RemoteDirectory, RemoteFile

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types that weights may be stored in."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]


def has_weights(directory: Path | RemoteDirectory) -> bool:
    """Whether there is a file of weights, or an index of several."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


@contextmanager
def opened(file: Path, *, framework: str = "np") -> Iterator[Any]:
    """A safetensors file, mapped and not read. Raises ValueError, with the file's name, where it is damaged."""
    try:
        with safe_open(file, framework=framework) as stored:
            yield stored
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}; copy the file again") from error


def read_index(path: Path | RemoteFile) -> dict[str, str]:
    """The file of each tensor, relative to the directory of the index.

    Raises:
        ValueError: it is no index, or lists a file of another directory.
    """
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files = {name: str(file) for name, file in weight_map.items()}
        for file in set(files.values()):
            inside(Path(str(path.parent)), file)
        return files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{path} is no index of weights: {error}") from error


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of the files that make up a checkpoint, also those that the index passes over.

    Raises:
        ValueError: there are no weights, a file is missing or damaged, or it lacks what the index expects in it.
    """
    if (single := directory / SINGLE).is_file():
        return _tensors_of(single)
    if not (directory / INDEX).is_file():
        raise ValueError(f"{directory} has no weights: neither {SINGLE} nor {INDEX} is there")
    index = {name: directory / file for name, file in read_index(directory / INDEX).items()}
    found: dict[str, Stored] = {}
    for file in sorted(set(index.values())):
        if not file.is_file():
            raise ValueError(f"{directory / INDEX} lists {file.name}, which is not there")
        there = _tensors_of(file)
        if missing := [name for name, place in index.items() if place == file and name not in there]:
            raise ValueError(f"{directory / INDEX} says that {file.name} holds {missing[0]}, and it does not")
        found |= {name: tensor for name, tensor in there.items() if index.get(name, file) == file}
    return found


def _tensors_of(file: Path) -> dict[str, Stored]:
    with opened(file) as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - it is no mapping
        return {name: Stored(file, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
