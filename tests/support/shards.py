"""Tensors of a sharded checkpoint, read without ranks and without the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a model in a checkpoint: weights, master weights, moments."""
    state: dict[str, Any] = {}
    reader = FileSystemReader(directory)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(_tensors(state))


def names_of(directory: Path) -> set[str]:
    """Return the names of everything in a checkpoint: tensors and objects."""
    return set(FileSystemReader(directory).read_metadata().state_dict_metadata)


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(value, f"{name}.{key}")
