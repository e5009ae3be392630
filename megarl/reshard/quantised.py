"""Checkpoints that are stored in FP8 or MXFP4: what `config.json` says, and the faults of their files.

A matrix `X.weight` is stored as FP8 numbers, and `X.weight_scale_inv` has one scale per block (in the form of
compressed-tensors `X.weight_scale`, per row or per block). A weight is its number times the scale of its block. The
stored dtype of a tensor decides: one that is stored in a plain float has no scale.

The transposed matrices X [experts, columns, rows] of all experts are stored in MXFP4 (OCP Microscaling Formats 1.0) as
`X_blocks` [experts, rows, columns / 32, 16], two numbers of four bits a byte, and `X_scales` [experts, rows,
columns / 32], the exponents of two. Torch is not needed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.platform.errors import UserError
from megarl.reshard.compressed import METHOD as COMPRESSED
from megarl.reshard.compressed import compressed_faults, compressed_size, is_size
from megarl.reshard.headers import CONFIG, FLOATS, Shape, Stored, config_field

KEY = "quantization_config"  # of config.json
METHOD = "quant_method"
FP8 = "F8_E4M3"
"""The dtype of numbers in blocks, in the notation of safetensors."""
SCALE = "_scale_inv"  # behind the name of a matrix
COMPRESSED_SCALE = "_scale"  # the same in the form of compressed-tensors
SCALE_DTYPES = ("F32", "BF16")
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"  # behind the name of the matrices of all experts
MXFP4_DTYPE = "U8"
MXFP4_SIZE = 32  # numbers that share a scale
METHODS = ("fp8", COMPRESSED, "mxfp4")
REMEDY = "start from the bf16 checkpoint"
ALLOWED = {
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
    columns: int | None  # None: all
    scale: str = SCALE  # behind the name of a matrix

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Return the shape of the scales of a matrix."""
        rows, columns = shape
        return -(-rows // self.rows), -(-columns // self.columns) if self.columns else 1

    def __str__(self) -> str:
        return f"blocks of {self.rows} x {self.columns or 'all'}"


def quantisation_faults(declared: object, methods: Sequence[str] = METHODS) -> Iterator[str]:
    """Yield a sentence for each part of a `quantization_config` that is not read here; None declares nothing."""
    if declared is None:
        return
    if not isinstance(declared, dict):
        yield f"{KEY} is no object, but a {type(declared).__name__}: {REMEDY}"
        return
    method = declared.get(METHOD)
    if method not in methods:
        yield f"{KEY}.{METHOD} {_shown(method)}: must be {' or '.join(map(repr, methods))}; {REMEDY}"
    elif method == "fp8":
        yield from _fp8_faults(declared)
    elif method == COMPRESSED:
        yield from (f"{KEY}.{fault}; {REMEDY}" for fault in compressed_faults(declared))
    else:
        yield from _unknown_keys(declared, {METHOD, *UNREAD})


def _fp8_faults(declared: Mapping[str, object]) -> Iterator[str]:
    for key, allowed in ALLOWED.items():
        if declared.get(key) not in allowed:
            known = " or ".join(repr(value) for value in allowed if value)
            yield f"{KEY}.{key} {_shown(declared.get(key))}: must be {known}; {REMEDY}"
            return
    size = declared.get(SIZE)
    if not is_size(size):
        yield f"{KEY}.{SIZE} {_shown(size)}: must be rows and columns of a block, such as [128, 128]; {REMEDY}"
    yield from _unknown_keys(declared, {METHOD, SIZE, *ALLOWED, *UNREAD})


def _unknown_keys(declared: Mapping[str, object], known: set[str]) -> Iterator[str]:
    others = sorted(str(key) for key in declared.keys() - known)
    if others:
        yield f"{KEY}.{others[0]} is not known here: {REMEDY}"


def block_of(declared: object) -> Block | None:
    """Return the FP8 blocks that a `quantization_config` declares; None if it declares none.

    Raises:
        UserError: it declares another form.
    """
    for fault in quantisation_faults(declared):
        raise UserError(f"{CONFIG}: {fault}")
    if not isinstance(declared, dict):
        return None
    if declared[METHOD] == COMPRESSED:
        return Block(*compressed_size(declared), COMPRESSED_SCALE)
    return Block(*declared[SIZE]) if SIZE in declared else None


def stored_block(directory: Path) -> Block | None:
    """Return the FP8 blocks that the `config.json` of a directory declares; None if it declares none.

    Raises:
        UserError: the file cannot be read, or declares another form.
    """
    return block_of(declared_in(directory))


def declared_in(directory: Path) -> object:
    """Return the `quantization_config` of a directory; None if there is none. Raises UserError for a damaged file."""
    return config_field(directory, KEY)


def matrix_of(name: str) -> str | None:
    """Return the matrix that a tensor of this name has the scales of; None if it is no name of scales."""
    for end in (SCALE, COMPRESSED_SCALE):
        if name.endswith(f".weight{end}"):
            return name.removesuffix(end)
    return None


def matrix_fault(name: str, matrix: Stored, scales: Stored | None, block: Block | None) -> str | None:
    """Return why an FP8 tensor cannot be read; None if it can."""
    where = f"{name} in {matrix.file} is stored as {matrix.dtype}"
    if block is None:
        return f"{where}, and {CONFIG} has no {KEY}; {not_plain()}"
    if len(matrix.shape) != 2:  # rows and columns
        return f"{where} with shape {matrix.shape}; only matrices have blocks: {REMEDY}"
    if scales is None:
        return f"{where}, and its scales {name}{block.scale} are missing: copy the checkpoint again, or {REMEDY}"
    needed = block.grid(matrix.shape)
    scale = f"{name}{block.scale} in {scales.file}"
    if scales.shape != needed:
        return f"{scale} has shape {scales.shape}; {block} of {name} {matrix.shape} have {needed} scales: {REMEDY}"
    if scales.dtype not in SCALE_DTYPES:
        return f"{scale} is stored as {scales.dtype}; scales must be {' or '.join(SCALE_DTYPES)}: {REMEDY}"
    return None


def mxfp4_of(name: str) -> str | None:
    """Return the matrices that a tensor of this name has numbers or scales of; None if it is no such name."""
    for end in (MXFP4_BLOCKS, MXFP4_SCALES):
        if name.endswith(end):
            return name.removesuffix(end)
    return None


def mxfp4_fault(name: str, blocks: Stored, scales: Stored | None) -> str | None:
    """Return why matrices in MXFP4 cannot be read; None if they can."""
    where = f"{name}{MXFP4_BLOCKS} in {blocks.file}"
    if blocks.dtype != MXFP4_DTYPE or len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_SIZE // 2:
        return (
            f"{where} is stored as {blocks.dtype} with shape {blocks.shape}; it must be U8, 16 bytes a block: {REMEDY}"
        )
    if scales is None:
        return f"{where} has no scales {name}{MXFP4_SCALES}: copy the checkpoint again, or {REMEDY}"
    if (scales.dtype, scales.shape) != (MXFP4_DTYPE, blocks.shape[:3]):
        found = f"{name}{MXFP4_SCALES} in {scales.file} is stored as {scales.dtype} with shape {scales.shape}"
        return f"{found}; it must be {MXFP4_DTYPE} with shape {blocks.shape[:3]}: {REMEDY}"
    return None


def mxfp4_shape(blocks: Shape) -> tuple[int, int, int]:
    """Return the shape of matrices, [experts, columns, rows], by the shape of their numbers."""
    return blocks[0], blocks[2] * MXFP4_SIZE, blocks[1]


def without_mxfp4(stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """Return the tensors with those in MXFP4 as if they were in bf16, and a sentence for each that cannot be read."""
    found = dict(stored)
    faults = []
    for name in stored:
        own = mxfp4_of(name)
        if own is None or f"{own}{MXFP4_BLOCKS}" not in found:
            continue
        blocks = found.pop(f"{own}{MXFP4_BLOCKS}")
        fault = mxfp4_fault(own, blocks, found.pop(f"{own}{MXFP4_SCALES}", None))
        if fault:
            faults.append(fault)
        else:
            found[own] = Stored(blocks.file, "BF16", mxfp4_shape(blocks.shape))
    return found, faults


def not_plain() -> str:
    """Return the words for a dtype that weights may not have."""
    return f"weights must be plain floats ({', '.join(FLOATS)})"


def block_faults(stored: Mapping[str, Stored], block: Block) -> Iterator[str]:
    """Yield a sentence for the first FP8 matrix or scale that has no partner of its shape, and the number of others."""
    faults = []
    for name, tensor in stored.items():
        matrix = matrix_of(name)
        if tensor.dtype == FP8:
            faults.append(matrix_fault(name, tensor, stored.get(name + block.scale), block))
        elif matrix is not None and (matrix not in stored or stored[matrix].dtype != FP8):
            found = f"is stored as {stored[matrix].dtype}" if matrix in stored else "is missing"
            faults.append(f"{name} in {tensor.file} has the scales of {matrix}, which {found}: {REMEDY}")
    wrong = [fault for fault in faults if fault]
    if wrong:
        yield wrong[0] + (f" (and {len(wrong) - 1} more tensors do not fit)" if len(wrong) > 1 else "")


def _shown(value: object) -> str:
    return repr(value)[:60]
