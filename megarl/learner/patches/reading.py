"""Reading a sharded checkpoint without running code from it."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megarl.platform.files import inside
from megarl.platform.patching import declare, replaced

FORCE_DATA_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
INDEX_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
INDEX_NAMES = (
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
)
INDEX_PICKLE = declare(
    "torch.distributed.checkpoint.filesystem",
    "pickle",
    library="torch",
    versions=">=2.11,<2.15",
    reason="the index of a sharded checkpoint is read as any pickle, which can run code",
    upstream="https://github.com/pytorch/pytorch/issues/189308",
    until="torch reads the index with an allowlist",
)


@contextmanager
def reading_data_only() -> Iterator[None]:
    """Refuse code in the index of a sharded checkpoint and in its small objects, which torch reads as pickles.

    Within the block both may name only the types that torch itself writes there. An index that leads to files of other
    directories is an error too.
    """
    forced = os.environ.get(FORCE_DATA_ONLY)
    os.environ[FORCE_DATA_ONLY] = "1"
    try:
        with replaced(INDEX_PICKLE, pickle=SimpleNamespace(load=load_index)):
            yield
    finally:
        if forced is None:
            del os.environ[FORCE_DATA_ONLY]
        else:
            os.environ[FORCE_DATA_ONLY] = forced


def load_index(file: BinaryIO) -> Metadata:
    """Return the index of a sharded checkpoint, which is a pickle.

    Raises:
        pickle.UnpicklingError: it names something other than torch's records.
        UserError: it leads to files of other directories.
    """
    index: Metadata = _IndexUnpickler(file).load()
    for place in index.storage_data.values():
        inside(Path(), place.relative_path)
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 writes so a member of an enumeration
            return _member
        found = super().find_class(module, name) if module in INDEX_MODULES else None
        is_record = isinstance(found, type) and found.__module__ == module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_record or is_dtype or (module, name) in INDEX_NAMES):
            raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which is no record of torch's")
        return super().find_class(module, name)


def _member(enumeration: object, name: str) -> Enum:
    """Return a member of an enumeration, and nothing else that an attribute might be."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise pickle.UnpicklingError(f"the checkpoint's index asks for {name} of {enumeration}, no enumeration")
    return enumeration[name]
