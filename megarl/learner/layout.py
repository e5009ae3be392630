"""Which boxes of the Hugging Face parameters this rank's Megatron parameters hold."""

import re
from typing import Any

import torch

from megarl.learner.parallel import Mesh
from megarl.models.architecture import Architecture
from megarl.models.weights import pieces
from megarl.reshard.layout import Layout

VALUE_HEAD = "output_layer.weight"
LOCAL_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def weights(module: Any) -> dict[str, torch.Tensor]:
    """The local parameters by name, without gradient; they share the model's memory."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def source_layout(module: Any, architecture: Architecture, mesh: Mesh, *, has_value_head: bool) -> Layout:
    """The layout of a GPTModel's local parameters.

    A value head is no Hugging Face parameter of the language model and has no piece.
    """

    def with_global_layer(name: str) -> str:
        return LOCAL_LAYER.sub(lambda match: str(module.decoder.layers[int(match[0])].layer_number - 1), name)

    return tuple(
        piece
        for name, tensor in weights(module).items()
        if not (has_value_head and name == VALUE_HEAD)
        for piece in pieces(
            architecture,
            with_global_layer(name),
            tuple(tensor.shape),
            param=name,
            dtype=tensor.dtype,
            tp_rank=mesh.tp_rank,
            tp_size=mesh.tp_size,
        )
    )
