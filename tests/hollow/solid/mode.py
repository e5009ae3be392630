"""Real numbers on the hollow device: the CPU computes every operation, in the same memory.

The memory of the hollow device is memory of the host, so every tensor of it has an alias on the CPU. An operation first
runs on the device: torch checks devices, types and shapes, chooses streams, allocates and launches; the kernel does
nothing. Then the CPU computes the operation on the aliases, and its results go to the places that the kernel would have
written. An operation that the CPU cannot compute is an error, never a zero.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.hollow.solid import graphs
from tests.hollow.solid.operations import LEFT, WRITTEN_OUT, ZEROS, is_sized_by_numbers

CPU = torch.device("cpu")
DRIVER = ctypes.CDLL("libcuda.so.1")
COMPUTE = ctypes.PyDLL("libcuda.so.1").hollow_compute  # called for each operation, so it keeps Python's lock


def alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor in the memory of a tensor of the device. It must not outlive that tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        if tensor.numel():
            raise RuntimeError(
                f"a tensor of {tensor.numel()} numbers has lost its memory: its storage was resized to 0"
            )
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    there = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype).set_(there, *place)
    found = torch._conj(found) if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def on_host(value: Any) -> Any:
    """Return what an argument of an operation is on the CPU. Random numbers come from the CPU's generator."""
    if isinstance(value, Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return CPU
    return None if isinstance(value, torch.Generator) else value


def put(there: Any, here: Any, name: str) -> Any:
    """Put the results of the CPU into those of the device, whose memory the aliases in `there` are.

    Return the results: aliases, and the numbers of the CPU.
    """
    targets, spec = tree_flatten(there)
    results = tree_leaves(here)
    for place, (target, result) in enumerate(zip(targets, results, strict=True)):
        if result is None:  # the device's result says all
            continue
        if not isinstance(target, Tensor):
            targets[place] = result
        elif isinstance(result, Tensor) and (result.numel() or not target.numel()):  # nobody reads what is left empty
            assert target.shape == result.shape, f"{name}: {target.shape} on the device, {result.shape} on the CPU"
            if target.data_ptr() != result.data_ptr() or target.stride() != result.stride():
                target.copy_(result)
    return tree_unflatten(targets, spec)


def clear(tensor: Tensor) -> Tensor:
    """Make a tensor of the device zero. The pages of a large one are given back, and take no memory of the host."""
    if tensor.is_cuda and tensor.is_contiguous():
        graphs.do(functools.partial(fill_with_zeros, tensor.data_ptr(), tensor.nbytes))
    elif tensor.is_cuda:
        graphs.do(alias(tensor).zero_)
    return tensor


def fill_with_zeros(address: int, num_bytes: int) -> None:
    """Fill memory of the device with zeros."""
    assert DRIVER.hollow_set(ctypes.c_void_p(address), 0, ctypes.c_size_t(num_bytes)) or not num_bytes


@contextmanager
def seeded_like(generator: torch.Generator) -> Iterator[None]:
    """Draw within the block from a seed that follows from the state of a generator of the device."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(hash((generator.initial_seed(), generator.get_offset())))
    try:
        yield
    finally:
        torch.set_rng_state(before)


class Solid(TorchDispatchMode):
    """Computes on the CPU what the device is asked for within the block.

    Operations that are written in Python, whose names are `in_python`, enter it again by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_python = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_on_device = any(tensor.is_cuda for tensor in tensors) or _is_cuda(kwargs.get("device"))
        is_symbolic = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_on_device or is_symbolic:
            return func(*args, **kwargs)
        COMPUTE(1)
        try:
            return self._on_device(func, args, kwargs, leaves, tensors)
        finally:
            COMPUTE(-1)

    def _on_device(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], tensors: list[Tensor]) -> Any:
        """Run an operation on the device, and compute it. `leaves` and their `tensors` are those of the arguments."""
        if self._is_left(func):
            return func(*args, **kwargs)
        if func._can_decompose():  # in inference mode, whoever says `to` may mean a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags:  # no number changes
            return func(*args, **kwargs)
        if func.name() in ZEROS:
            return clear(func(*args, **kwargs))
        if is_sized_by_numbers(func.name(), args, kwargs):
            graphs.refuse(func.name())
            found = func(*tree_map(on_host, args), **tree_map(on_host, kwargs))
            if func._schema.is_mutable:
                return args[0]
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, found)
        if torch.Tag.nondeterministic_seeded in func.tags:
            device = kwargs.get("device") or next(tensor.device for tensor in tensors if tensor.is_cuda)
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
            graphs.refuse(func.name())
            generator = given[0] if given else torch.cuda.default_generators[device.index or 0]
            with seeded_like(generator):
                return self._compute(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _is_left(self, func: Any) -> bool:
        return func.name() in LEFT or func.name() in self.in_python or func.namespace == "c10d"

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        there = func(*args, **kwargs)
        compute = WRITTEN_OUT.get(func.name(), func)
        memory, arguments, keywords = tree_map(on_host, (there, args, kwargs))

        def work() -> Any:
            try:
                return put(memory, compute(*arguments, **keywords), func.name())
            except NotImplementedError as error:
                raise NotImplementedError(f"{func.name()} has no kernel of the CPU, and is not written out") from error

        if graphs.is_capturing():
            graphs.do(work)
            return there
        tensors, spec = tree_flatten(there)
        numbers = tree_leaves(work())
        pairs = zip(tensors, numbers, strict=True)
        return tree_unflatten([one if isinstance(one, Tensor) else number for one, number in pairs], spec)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def show(tensor: Tensor, *, tensor_contents: str | None = None, write: Any = torch._tensor_str._str) -> str:
    """Return the text of a tensor. torch makes it without modes, so the numbers are read from the alias."""
    if tensor.is_cuda and tensor_contents is None:
        tensor_contents = torch._tensor_str._tensor_str(alias(tensor.detach()), len("tensor("))
    text: str = write(tensor, tensor_contents=tensor_contents)
    return text


def enter_within_operations(mode: Solid, implement: Any = torch.library.Library.impl) -> None:
    """Enter the mode within operations that are written in Python: torch leaves it when it calls them."""

    def register(library: Any, name: Any, function: Any, dispatch_key: str = "", **more: Any) -> Any:
        if (dispatch_key or library.dispatch_key) not in ("CUDA", "CompositeExplicitAutograd") or library.ns == "aten":
            return implement(library, name, function, dispatch_key, **more)

        @functools.wraps(function)
        def compute(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return function(*args, **kwargs)

        operation = name if isinstance(name, str) else name.name()
        mode.in_python.add(operation if "::" in operation else f"{library.ns}::{operation}")
        return implement(library, name, compute, dispatch_key, **more)

    torch.library.Library.impl = register  # type: ignore[method-assign]


def enter_everywhere(_: Any = torch) -> None:
    """Make the device solid for this thread, and for every thread of Python that starts later."""
    mode = Solid()
    torch._tensor_str._str = show  # type: ignore[assignment]
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans its kernels by what it knows of a real device
    enter_within_operations(mode)
    graphs.keep_captured_work()

    def enter(frame: Any, event: str, arg: Any) -> None:
        sys.setprofile(None)
        mode.__enter__()

    mode.__enter__()
    threading.setprofile(enter)  # called once in each new thread
