"""Checkpoints that are stored in FP8 blocks: what `config.json` says about them, and the faults of their files.

A matrix `X.weight` is stored as FP8 numbers, and beside it `X.weight_scale_inv` has one scale per block. A weight is
its number times the scale of its block. The stored dtype of a tensor decides: one that is stored in a plain float has
no scale. Torch is not needed here.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.platform.errors import UserError
from megarl.reshard.headers import CONFIG, FLOATS, Stored

KEY = "quantization_config"  # of config.json
FP8 = "F8_E4M3"
"""The dtype of numbers in blocks, in the notation of safetensors."""
SCALE = "_scale_inv"  # behind the name of a matrix
SCALE_DTYPES = ("F32", "BF16")
REMEDY = "start from the bf16 checkpoint"
ALLOWED = {
    "quant_method": ("fp8",),
    "activation_scheme": (None, "dynamic"),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),  # how scales were rounded; their stored dtype decides
}
NAMES = ("ignored_layers", "modules_to_convert", "modules_to_not_convert")  # follow from the stored dtypes
UNREAD = ("dequantize", *NAMES)
SIZE = "weight_block_size"


@dataclass(frozen=True)
class Block:
    """The size of the blocks that share a scale. Blocks at the last rows and columns may be smaller."""

    rows: int
    columns: int

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix."""
        rows, columns = shape
        return -(-rows // self.rows), -(-columns // self.columns)


def quantisation_faults(declared: object) -> Iterator[str]:
    """Yield a sentence for each part of a `quantization_config` that is not read here; None declares nothing."""
    if declared is None:
        return
    if not isinstance(declared, dict):
        yield f"{KEY} is no object, but a {type(declared).__name__}: {REMEDY}"
        return
    for key, allowed in ALLOWED.items():
        if declared.get(key) not in allowed:
            known = " or ".join(repr(value) for value in allowed if value)
            yield f"{KEY}.{key} {_shown(declared.get(key))}: must be {known}; {REMEDY}"
            return
    size = declared.get(SIZE)
    if not _is_size(size):
        yield f"{KEY}.{SIZE} {_shown(size)}: must be rows and columns of a block, such as [128, 128]; {REMEDY}"
    others = sorted(str(key) for key in declared.keys() - {*ALLOWED, *UNREAD, SIZE})
    if others:
        yield f"{KEY}.{others[0]} is not known here: {REMEDY}"


def block_of(declared: object) -> Block | None:
    """Return the blocks that a `quantization_config` declares; None if it is None.

    Raises:
        UserError: it declares another form.
    """
    for fault in quantisation_faults(declared):
        raise UserError(f"{CONFIG}: {fault}")
    return Block(*declared[SIZE]) if isinstance(declared, dict) else None


def stored_block(directory: Path) -> Block | None:
    """Return the blocks that the `config.json` of a directory declares; None if there is none, or no such file.

    Raises:
        UserError: the file cannot be read, or declares another form.
    """
    file = directory / CONFIG
    if not file.exists():
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}; write it again") from error
    return block_of(config.get(KEY) if isinstance(config, dict) else None)


def matrix_of(name: str) -> str | None:
    """Return the matrix that a tensor of this name has the scales of; None if it is no name of scales."""
    return name.removesuffix(SCALE) if name.endswith(f".weight{SCALE}") else None


def matrix_fault(name: str, matrix: Stored, scales: Stored | None, block: Block | None) -> str | None:
    """Return why an FP8 tensor cannot be read; None if it can."""
    where = f"{name} in {matrix.file} is stored as {matrix.dtype}"
    if block is None:
        return f"{where}, and {CONFIG} has no {KEY}; {not_plain()}"
    if len(matrix.shape) != 2:  # rows and columns
        return f"{where} with shape {matrix.shape}; only matrices have blocks: {REMEDY}"
    if scales is None:
        return f"{where}, and its scales {name}{SCALE} are missing: copy the checkpoint again, or {REMEDY}"
    needed = block.grid(matrix.shape)
    scale = f"{name}{SCALE} in {scales.file}"
    if scales.shape != needed:
        blocks = f"blocks of {block.rows} x {block.columns}"
        return f"{scale} has shape {scales.shape}; {blocks} of {name} {matrix.shape} have {needed} scales: {REMEDY}"
    if scales.dtype not in SCALE_DTYPES:
        return f"{scale} is stored as {scales.dtype}; scales must be {' or '.join(SCALE_DTYPES)}: {REMEDY}"
    return None


def not_plain() -> str:
    """Return the words for a dtype that weights may not have."""
    return f"weights must be plain floats ({', '.join(FLOATS)})"


def block_faults(stored: Mapping[str, Stored], block: Block) -> Iterator[str]:
    """Yield a sentence for the first FP8 matrix or scale that has no partner of its shape, and the number of others."""
    faults = []
    for name, tensor in stored.items():
        matrix = matrix_of(name)
        if tensor.dtype == FP8:
            faults.append(matrix_fault(name, tensor, stored.get(name + SCALE), block))
        elif matrix is not None and (matrix not in stored or stored[matrix].dtype != FP8):
            found = f"is stored as {stored[matrix].dtype}" if matrix in stored else "is missing"
            faults.append(f"{name} in {tensor.file} has the scales of {matrix}, which {found}: {REMEDY}")
    wrong = [fault for fault in faults if fault]
    if wrong:
        yield wrong[0] + (f" (and {len(wrong) - 1} more tensors do not fit)" if len(wrong) > 1 else "")


def _is_size(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)


def _shown(value: object) -> str:
    return repr(value)[:60]
