"""The experts that `transformers` chooses, to compare routes of the engine with."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.batch import Generation
from tests.support.engines import PROMPTS


def scored_by_transformers(checkpoint: Path, generation: Generation) -> Tensor:
    """Return the scores of all experts for a response to one of PROMPTS, without its last token: [places, L, E]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    scores: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: scores.append(outputs[0].softmax(-1)))
    tokens = [*PROMPTS[generation.prompt].token_ids, *generation.token_ids]
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    return torch.stack(scores, dim=1)
