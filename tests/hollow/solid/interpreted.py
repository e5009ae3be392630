"""Kernels of Triton, interpreted in the memory of the device: neither compiled nor copied to the host and back.

Triton 3.7's interpreter keeps numbers of bfloat16 as their bits, multiplies and adds the bits, and cuts numbers of
float32 off. Here numbers of bfloat16 are widened to float32 first, and results are rounded to the nearest, as on a GPU.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.hollow.solid import graphs
from tests.hollow.solid.mode import alias


def on_host(value: Any) -> Any:
    """Return an argument of a kernel, with an alias instead of a tensor of the device."""
    return alias(value) if isinstance(value, Tensor) and value.is_cuda else value


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return numbers of bfloat16 in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest numbers of bfloat16, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)


def compute_in_bfloat16(interpreter: ModuleType) -> None:
    """Let the interpreter compute with numbers of bfloat16 instead of their bits."""
    language: Any = interpreter.tl  # type: ignore[attr-defined]
    handle: Any = interpreter.TensorHandle  # type: ignore[attr-defined]
    builder: Any = interpreter.InterpreterBuilder  # type: ignore[attr-defined]
    dot, binary, convert = builder.create_dot, builder.binary_op, interpreter._convert_float  # type: ignore[attr-defined]

    def wide(value: Any) -> Any:
        is_narrow = value.dtype.scalar == language.bfloat16
        return handle(widened(value.data), language.float32) if is_narrow else value

    def create_dot(self: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
        return dot(self, wide(left), wide(right), total, *rest)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        found = binary(self, wide(left), wide(right), operation)
        if language.bfloat16 in (left.dtype.scalar, right.dtype.scalar) and found.data.dtype == np.float32:
            return handle(rounded(found.data), language.bfloat16)
        return found

    def convert_float(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (language.float32, language.bfloat16):
            return rounded(numbers)
        return convert(numbers, source, target, rounding)

    builder.create_dot, builder.binary_op = create_dot, binary_op
    interpreter._convert_float = convert_float  # type: ignore[attr-defined]


def interpret_in_place(interpreter: ModuleType) -> None:
    """Let the interpreter read and write the memory of the device."""
    executor: Any = interpreter.GridExecutor  # type: ignore[attr-defined]
    interpret = executor.__call__

    def launch(self: Any, *arguments: Any, **keywords: Any) -> None:
        given, named = tree_map(on_host, (arguments, keywords))
        graphs.do(lambda: interpret(self, *given, **named))

    executor.__call__ = launch
    executor._init_args_hst = lambda self, given, named: (list(given), named)
    executor._restore_args_dev = lambda *_: None
    compute_in_bfloat16(interpreter)
