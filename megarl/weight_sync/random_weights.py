"""Random weights, to verify a model without a checkpoint."""

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from megarl.models.architecture import Architecture, hf_shapes
from megarl.platform.files import replacing
from megarl.reshard.files import ShardWriter
from megarl.reshard.headers import SINGLE
from megarl.reshard.layout import Piece, row_major, whole

# The scale of random weights: some tokens and some experts are far likelier than others, as in a trained model.
LOGIT_STD = 3.0
CHOOSING = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")


def write_random_weights(architecture: Architecture, directory: Path, *, dtype: torch.dtype) -> None:
    """Write `model.safetensors` with random weights, the same every time. Only one parameter is in memory at a time."""
    pieces = [
        Piece(name, whole(shape), name, 0, row_major(shape), dtype) for name, shape in hf_shapes(architecture).items()
    ]
    writer = ShardWriter()
    with replacing(directory / SINGLE) as file:
        writer.add(file, pieces)
        for piece in pieces:
            writer.open(piece.param).copy_(_draw(piece.name, piece.box.shape))
            writer.close(piece.param)
        writer.finish()


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return float32 values: a matrix keeps the size of its input, norms are around one, biases around zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) == 1:
        return values.mul_(0.1).add_(1.0 if "norm" in name else 0.0)
    return values.mul_((LOGIT_STD if name.endswith(CHOOSING) else 1.0) / math.sqrt(shape[-1]))
