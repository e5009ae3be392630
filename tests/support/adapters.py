"""Adapters of tests: their numbers follow from their names, and the answers from `transformers` on merged weights."""

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.learner.config import MegatronSection
from megarl.models.architecture import read_architecture
from megarl.models.lora import LORA_A, LORA_B, Lora, adapter_shapes
from tests.support.learners import ACTOR, CRITIC, make_test_learner, outputs_of_all, update
from tests.support.records import experience
from tests.support.references import outputs_of


def drawn(checkpoint: Path, lora: Lora, *, scores: bool = False) -> dict[str, Tensor]:
    """Return random matrices for all adapters of a model, by PEFT's names; if it `scores`, also for its scalar head."""
    architecture = read_architecture(json.loads((checkpoint / "config.json").read_text()))
    architecture = architecture.with_scalar_head() if scores else architecture
    return {
        name: 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        for name, shape in adapter_shapes(architecture, lora).items()
    }


def fill(learner: Any, matrices: Mapping[str, Tensor]) -> None:
    """Write the matrices of PEFT into a learner's adapters."""
    from megarl.learner.lora import adapter_layout, adapter_weights

    tensors = adapter_weights(learner.modules)
    for piece in adapter_layout(learner.modules):
        piece.view(tensors[piece.param]).copy_(at(matrices[piece.name], piece.box))


def at(tensor: Tensor, box: Any) -> Tensor:
    """Return the part of a tensor in a box."""
    return tensor[tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))]


def merged(checkpoint: Path, directory: Path, lora: Lora, matrices: Mapping[str, Tensor]) -> Path:
    """Write the checkpoint with merged adapters to a directory."""
    shutil.copytree(checkpoint, directory)
    weights = load_file(checkpoint / "model.safetensors")
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if LORA_A.format(path) in matrices:
            weights[name] = weight + lora.scale * matrices[LORA_B.format(path)] @ matrices[LORA_A.format(path)]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The correct results of an update of a model with adapters."""

    outputs: PolicyOutputs
    loss: float
    norm: float
    gradients: dict[str, Tensor]  # by PEFT's names


def answer(checkpoint: Path, directory: Path, lora: Lora) -> Answer:
    """Compute it from the gradient G of the merged weights W + s B A: that of A is s B^T G, that of B is s G A^T."""
    matrices = drawn(checkpoint, lora)
    model = AutoModelForCausalLM.from_pretrained(
        merged(checkpoint, directory / "merged", lora, matrices), dtype=torch.float32
    )
    start = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    batch = experience()
    outputs = outputs_of(model, batch, {None: start})
    loss, _ = ACTOR(outputs, batch, Totals.of(batch.num_learnt()))
    loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(directory / "gradients")  # by the names of the checkpoint: transformers renames experts
    of_weights = load_file(directory / "gradients" / "model.safetensors")
    gradients = {}
    for name in matrices:
        path = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        gradient = of_weights[f"{path}.weight"]
        a, b = matrices[LORA_A.format(path)], matrices[LORA_B.format(path)]
        gradients[LORA_A.format(path)] = lora.scale * b.T @ gradient
        gradients[LORA_B.format(path)] = lora.scale * gradient @ a.T
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return Answer(outputs=outputs, loss=float(loss.detach()), norm=float(norm), gradients=gradients)


MEGATRON_NAMES = {
    "q_proj": "self_attention.linear_qkv",
    "k_proj": "self_attention.linear_qkv",
    "v_proj": "self_attention.linear_qkv",
    "o_proj": "self_attention.linear_proj",
    "gate_proj": "mlp.linear_fc1",
    "up_proj": "mlp.linear_fc1",
    "down_proj": "mlp.linear_fc2",
}


def answer_with_dropout(checkpoint: Path, lora: Lora) -> Answer:
    """Compute the first update of a Llama by autograd, and by hooks on its layers that drop and add."""
    from megarl.learner.dropout import TokenDropout, token_keys

    matrices = {name: matrix.requires_grad_() for name, matrix in drawn(checkpoint, lora).items()}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    keys = torch.empty(0)

    def read(module: Any, inputs: tuple[Tensor]) -> None:
        nonlocal keys
        keys = token_keys(inputs[0][0], torch.tensor([inputs[0].shape[1]]))

    def hook(path: str, dropout: TokenDropout) -> Any:
        a, b = matrices[LORA_A.format(path)], matrices[LORA_B.format(path)]

        def add(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            with dropout.keys.set_to(keys):
                hidden = dropout(inputs[0][0], is_training=True)
            return output + lora.scale * hidden @ a.T @ b.T

        return add

    model.register_forward_pre_hook(read)
    for path, layer in model.named_modules():
        if LORA_A.format(path) in matrices:
            _, _, number, _, name = path.split(".")
            linear = f"decoder.layers.{number}.{MEGATRON_NAMES[name]}"
            columns = torch.arange(layer.weight.shape[1], dtype=torch.int32)
            dropout = TokenDropout(lora.dropout, f"{MegatronSection().seed} {linear}", columns, tp_rank=0, tp_size=1)
            dropout.begin("0.1")
            layer.register_forward_hook(hook(path, dropout))
    batch = experience()
    start = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    outputs = outputs_of(model, batch, {None: start})
    loss, _ = ACTOR(outputs, batch, Totals.of(batch.num_learnt()))
    loss.backward()
    gradients = {name: matrix.grad for name, matrix in matrices.items() if matrix.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return Answer(outputs=outputs, loss=float(loss.detach()), norm=float(norm), gradients=gradients)


def learn_together(checkpoint: Path, lora: Lora, fields: dict[str, Any], is_shared: bool) -> tuple[list[Tensor], int]:
    """Update a policy and a critic in turn. With `is_shared` both have their frozen weights in one memory.

    Return the outputs of the policy, of the policy without adapters and of the critic, and the bytes of all parameters.
    """
    from megarl.learner.batching import Budget

    actor = make_test_learner(checkpoint, fields, lora=lora)
    base = actor if is_shared else None
    critic = make_test_learner(checkpoint, fields, role="value", lora=lora, base=base, mesh=actor.mesh)
    reference = actor.without_adapters()
    batch, budget = experience(), Budget(max_tokens=40, max_sequences=None)
    for _ in range(2):
        outputs_of_all(reference, batch, budget)
        update(critic, [batch], CRITIC, budget)
        update(actor, [batch], ACTOR, budget)
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for learner in (actor, critic)
        for chunk in learner.modules
        for parameter in chunk.parameters()
    }
    policies = [outputs_of_all(policy, batch, budget).log_probs for policy in (actor, reference)]
    return [*policies, outputs_of_all(critic, batch, budget)], sum(storages.values())
