"""The boxes of the Hugging Face parameters that this rank's Megatron parameters hold."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarl.learner.parallel import Mesh
from megarl.models.architecture import Architecture
from megarl.models.weights import pieces
from megarl.reshard.layout import Layout

ROUTER_BIAS = "router.expert_bias"
LOCAL_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def weights(modules: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the local parameters by name, detached; they share the memory of the model's chunks."""
    return {param: tensor.detach() for param, tensor, _ in _parameters(modules)}


def source_layout(modules: Sequence[torch.nn.Module], architecture: Architecture, mesh: Mesh) -> Layout:
    """Return the layout of the local parameters of a GPTModel, whose chunks are `modules`."""
    return tuple(
        piece
        for param, tensor, name in _parameters(modules)
        for piece in pieces(
            architecture,
            name,
            tuple(tensor.shape),
            param=param,
            dtype=tensor.dtype,
            cut=mesh.cut,
        )
    )


def _parameters(modules: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the local name of every parameter, the parameter, and its name in the whole model.

    The bias of DeepSeek's router is included: it is a parameter in the checkpoint, but a buffer in Megatron.
    """
    for chunk, module in enumerate(modules):

        def with_global_layer(name: str, layers: Any = module.decoder.layers) -> str:
            return LOCAL_LAYER.sub(lambda match: str(layers[int(match[0])].layer_number - 1), name)

        biases = ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(ROUTER_BIAS))
        for name, tensor in (*module.named_parameters(), *biases):
            yield f"{chunk}.{name}" if len(modules) > 1 else name, tensor, with_global_layer(name)
