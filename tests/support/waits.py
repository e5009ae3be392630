"""The places where the host would wait for a device, found on the CPU.

The device is `cpu:0`, which torch takes for another device than `cpu`, the host, and computes in the same memory. A
tensor is the device's if it was brought there, made there, or computed from such a tensor.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megarl
import tests

DEVICE = torch.device("cpu", 0)
SOURCES = [Path(folder) for package in (megarl, megatron, tests) for folder in package.__path__]
REDIRECTION = "cpu.py"  # megarl's patch of the calls that Megatron-Core makes
aten: Any = torch.ops.aten
SHAPES_DEPEND_ON_NUMBERS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Waits(TorchDispatchMode):
    """Counts the waits in a block by the file and the function of megarl or Megatron-Core that causes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()
        self._storages: set[StorageWeakRef] = set()

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Count within the block, from zero."""
        self.found.clear()
        with self, Calls(self):
            yield self.found

    def has(self, tensor: Tensor) -> bool:
        """Return whether the tensor is the device's."""
        return StorageWeakRef(tensor.untyped_storage()) in self._storages

    def mark(self, value: Any, *, is_of_device: bool = True) -> Any:
        """Note that the tensors in `value` are the device's, or not. Return it."""
        change = self._storages.add if is_of_device else self._storages.discard
        for tensor in _tensors(value):
            change(StorageWeakRef(tensor.untyped_storage()))
        return value

    def wait(self, cause: str) -> None:
        """Count a wait of the code that runs."""
        frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
        ours = [(path.name, name) for path, name in frames if any(map(path.is_relative_to, SOURCES))]
        file, name = next(place for place in reversed(ours) if place[0] not in (Path(__file__).name, REDIRECTION))
        self.found[f"{file}:{name} {cause}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self.has, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        if func in SHAPES_DEPEND_ON_NUMBERS:
            self.wait(func.name())
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait(func.name())
        if func in INDEXING and any(x.dtype == torch.bool or not self.has(x) for x in _tensors(args[1])):
            self.wait(func.name())
        return self.mark(func(*args, **kwargs))


class Calls(TorchFunctionMode):
    """Notes what Python brings to the device and from it, for `Waits`."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, waits, name = kwargs or {}, self._waits, getattr(func, "__name__", "")
        named = [*(args[1:2] if name == "to" else ()), kwargs.get("device")]
        to = next((torch.device(x) for x in named if isinstance(x, torch.device | str)), None)
        is_moving = name == "to" and to is not None
        result = func(*args, **kwargs)
        if name in ("tolist", "numpy", "cpu") or (is_moving and to != DEVICE):
            if waits.has(args[0]):
                waits.wait(name)
                return waits.mark(result.clone(), is_of_device=False) if isinstance(result, Tensor) else result
        elif to == DEVICE:
            is_copied = name in ("tensor", "as_tensor") or (is_moving and not waits.has(args[0]))
            if is_copied and not kwargs.get("non_blocking"):
                waits.wait(name)
            return waits.mark(result)
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def on_device() -> Iterator[Waits]:
    """Let learners that are made in the block work on DEVICE, and count their waits."""
    from megarl.learner import factory, model
    from megarl.learner.patches import cpu

    waits = Waits()
    with ExitStack() as stack:
        stack.enter_context(patch.object(cpu, "CPU", DEVICE))
        for module in (factory, model):
            stack.enter_context(patch.object(module, "local_device", lambda: DEVICE))
        with waits.counted():
            yield waits
