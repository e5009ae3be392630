"""The boxes of the Hugging Face parameters that this rank's Megatron parameters hold."""

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel

from megarl.learner.parallel import Mesh
from megarl.models.architecture import Architecture
from megarl.models.weights import pieces
from megarl.reshard.layout import Layout

ROUTER_BIAS = "router.expert_bias"
LOCAL_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def weights(modules: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the local parameters by name, detached; they share the memory of the model's chunks."""
    return {param: tensor.detach() for param, tensor, _ in _parameters(modules)}


def share_frozen(owners: Sequence[torch.nn.Module], modules: Sequence[torch.nn.Module]) -> set[str]:
    """Put the weights of `modules` into the memory of the frozen weights of the same model; return their names."""
    shared = set()
    for number, (owner, chunk) in enumerate(zip(owners, modules, strict=True)):
        frozen = {name: weight for name, weight in owner.named_parameters() if not weight.requires_grad}
        for name, parameter in chunk.named_parameters():
            if name in frozen and frozen[name].shape == parameter.shape:
                parameter.data = frozen[name].data
                shared.add(local_name(name, number, modules))
    return shared


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


def _parameters(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the local name of every parameter, the parameter, and its name in the whole model."""
    for number, chunk in enumerate(modules):
        for name, tensor in chunk_parameters(chunk):
            yield local_name(name, number, modules), tensor, global_name(name, chunk)


def chunk_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a chunk by name, without adapters.

    The bias of DeepSeek's router is included: it is a parameter in the checkpoint, but a buffer in Megatron.
    """
    yield from ((name, parameter) for name, parameter in chunk.named_parameters() if not is_adapter(name))
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of Megatron's model is a matrix of an adapter (`learner/lora.py`)."""
    return name.endswith((".lora_a", ".lora_b"))


def local_name(name: str, number: int, modules: Sequence[torch.nn.Module]) -> str:
    """Return the key of a parameter of chunk `number`, among those of all chunks of this rank."""
    return f"{number}.{name}" if len(modules) > 1 else name


def global_name(name: str, chunk: GPTModel) -> str:
    """Return the name of a chunk's parameter in the whole model, with the global number of its layer."""
    layers = chunk.decoder.layers
    return LOCAL_LAYER.sub(lambda match: str(layers[int(match[0])].layer_number - 1), name)
