"""The bytes that tensors, arrays and other Python objects take, exactly: no allocator is between them and the count."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that operations of torch make, and what tracemalloc counts, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._storages = dict[int, tuple[StorageWeakRef, int]]()
        self.peak = 0
        self.present = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given:  # a view of numbers of numpy is none of torch's own
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.note()
        return made

    def note(self) -> None:
        """Count what is there now."""
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        traced, _ = tracemalloc.get_traced_memory()
        self.present = traced + sum(num_bytes for _, num_bytes in self._storages.values())
        self.peak = max(self.peak, self.present)


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Count the allocations within the block."""
    found = Allocations()
    tracemalloc.start()
    try:
        with found:
            yield found
            found.note()
    finally:
        tracemalloc.stop()
