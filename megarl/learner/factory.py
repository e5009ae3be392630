"""Construction of a sharded `Learner` from a Hugging Face checkpoint."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import nn

from megarl.learner.batching import Replays
from megarl.learner.config import MegatronSection, OptimSection
from megarl.learner.experts import routers_of
from megarl.learner.layout import share_frozen, source_layout, weights
from megarl.learner.learner import Learner
from megarl.learner.lora import adapter_layout, adapter_weights, add_adapters
from megarl.learner.model import build_model
from megarl.learner.offload import Offload
from megarl.learner.optimizer import Optimizer, make_trainable
from megarl.learner.parallel import Mesh
from megarl.models.architecture import SCORE, Architecture, Shapes, hf_shapes
from megarl.models.config import Recompute
from megarl.models.lora import HEAD_OF_ADAPTERS, Lora, adapter_shapes
from megarl.models.peft import require_known
from megarl.platform.device import local_device
from megarl.platform.errors import UserError
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.headers import ADAPTERS


def make_learner(
    checkpoint: Path | None,
    architecture: Architecture,
    section: MegatronSection,
    mesh: Mesh,
    *,
    role: Literal["policy", "value"],
    temperature: float = 1.0,
    recompute: Recompute = False,
    balance: bool = True,
    training: tuple[OptimSection, float, int] | None = None,
    freeze_routers: bool = False,
    lora: Lora | None = None,
    base: Learner | None = None,
    replays: Replays = "none",
) -> Learner:
    """Build this rank's part of a model, and read its weights: each rank reads only its own slices.

    Args:
        checkpoint: Hugging Face directory with safetensors; None leaves every weight zero, to be loaded later.
        architecture: of its config.json, with overrides applied.
        section: the split, and the place of the model's parts.
        mesh: this rank's place.
        role: `policy` keeps the LM head; `value` has a scalar head. A checkpoint that scores sequences brings its
            scalar head; any other scalar head starts at zero.
        temperature: of the sampler whose log-probabilities a policy reports.
        recompute: compute activations again in the backward pass: all, or those inside of the feed-forward layers.
        balance: spread samples by length over data-parallel ranks.
        training: optimizer section, gradient clip, and number of steps in which the model learns; None if it never
            does.
        freeze_routers: keep the routers of experts as they are.
        lora: the adapters, which then learn instead of the weights. A new scalar head learns too.
        base: a model with adapters of the same checkpoint and split; both have their frozen weights in one memory.
        replays: what the routers of experts take of the routes of samples that have any.

    Raises:
        UserError: the checkpoint lacks a parameter, or a policy is asked of a checkpoint without an LM head.
    """
    if role == "policy" and architecture.scalar_head:
        raise UserError(
            f"{checkpoint} scores sequences and predicts no tokens: a policy must start from a language model"
        )
    has_head = role == "policy" or architecture.scalar_head
    if role == "value":
        architecture = architecture.with_scalar_head()
    modules = tuple(
        build_model(architecture, section, mesh, recompute=recompute, chunk=chunk) for chunk in range(mesh.vpp_size)
    )
    shared = share_frozen(base.modules, modules) if base else set()
    if checkpoint:
        _read_weights(checkpoint, modules, architecture, mesh, has_head=has_head, ready=shared)
    if freeze_routers:
        for router in routers_of(modules):
            router.requires_grad_(False)
    if lora:
        add_adapters(modules, architecture, lora, mesh, seed=section.seed)
        if lora.start:
            _read_adapters(lora.start, modules, adapter_shapes(architecture, lora))
    models: tuple[GPTModel | DistributedDataParallel, ...] = modules
    optimizer: Optimizer | None = None
    if training:
        optim, grad_clip, num_updates = training
        models, optimizer = make_trainable(modules, section, optim, grad_clip=grad_clip, num_updates=num_updates)
    offload = Offload(models, optimizer and optimizer.megatron, section, frozen=base.offload.frozen if base else None)
    offload.park()
    return Learner(
        models=models,
        optimizer=optimizer,
        offload=offload,
        mesh=mesh,
        architecture=architecture,
        temperature=temperature,
        device=local_device(),
        balance=balance,
        lora=lora,
        replays=replays,
    )


def _read_weights(
    checkpoint: Path,
    modules: tuple[nn.Module, ...],
    architecture: Architecture,
    mesh: Mesh,
    *,
    has_head: bool,
    ready: Collection[str],
) -> None:
    """Fill this rank's parameters, except those `ready`, from its slices of the files.

    Without `has_head`, leave the head as it is.
    """
    layout = [piece for piece in source_layout(modules, architecture, mesh) if piece.param not in ready]
    layout = layout if has_head else [piece for piece in layout if piece.name != SCORE]
    files = CheckpointFiles(checkpoint)
    if has_head and architecture.scalar_head:
        _check_head(checkpoint, files.names, trunk=architecture.layer_prefix(0).partition(".")[0])
    files.load(layout, weights(modules), shapes=hf_shapes(architecture))


def _read_adapters(directory: Path, modules: tuple[nn.Module, ...], shapes: Shapes) -> None:
    """Fill this rank's adapters from a directory of PEFT."""
    files = CheckpointFiles(directory, single=ADAPTERS)
    require_known(directory, files.names, shapes)
    layout = adapter_layout(modules)
    if HEAD_OF_ADAPTERS not in files.names:  # they belong to a language model: the head stays as it is
        layout = tuple(piece for piece in layout if piece.name != HEAD_OF_ADAPTERS)
    files.load(layout, adapter_weights(modules), shapes=shapes)


def _check_head(checkpoint: Path, names: Collection[str], *, trunk: str) -> None:
    heads = sorted(name for name in names if not name.startswith(f"{trunk}."))
    if SCORE not in heads or "score.bias" in heads:
        raise UserError(
            f"{checkpoint}: the head of a model that scores sequences must be one matrix, {SCORE}; this checkpoint's "
            f"tensors outside the decoder are {', '.join(heads) or 'none'}"
        )
