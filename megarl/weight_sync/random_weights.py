"""Random weights, to verify a model without a checkpoint."""

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from megarl.models.architecture import Architecture, hf_shapes
from megarl.models.linear import PREFIX
from megarl.platform.files import replacing
from megarl.reshard.files import ShardWriter
from megarl.reshard.headers import SINGLE
from megarl.reshard.layout import Piece

LOGIT_STD = 3.0  # some tokens and some experts are far likelier than others, as in a trained model


def write_random_weights(architecture: Architecture, directory: Path, *, dtype: torch.dtype) -> None:
    """Write `model.safetensors` with random weights, the same every time. Only one parameter is in memory at a time."""
    pieces = [Piece.complete(name, shape, dtype) for name, shape in hf_shapes(architecture).items()]
    choosing = [architecture.embedding_name, architecture.head_name]
    if architecture.experts:
        choosing.append(architecture.traits.parameter_name(f".{architecture.expert_names.block}.gate.weight"))
    writer = ShardWriter()
    with replacing(directory / SINGLE) as file:
        writer.add(file, pieces)
        for piece in pieces:
            scale = LOGIT_STD if piece.name.endswith(tuple(choosing)) else 1.0
            is_centred = architecture.traits.centred_norm and not piece.name.endswith(f"{PREFIX}norm.weight")
            values = _draw(piece.name, piece.box.shape, scale=scale, norm=0.0 if is_centred else 1.0)
            writer.open(piece.param).copy_(values)
            writer.close(piece.param)
        writer.finish()


def _draw(name: str, shape: tuple[int, ...], *, scale: float, norm: float) -> Tensor:
    """Return float32 values: a matrix scales the size of its input, norms are around `norm`, biases around zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) == 1:
        return values.mul_(0.1).add_(norm if name.endswith("norm.weight") else 0.0)
    return values.mul_(scale / math.sqrt(shape[-1]))
