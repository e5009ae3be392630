"""Results of one unsharded `transformers` model with plain autograd, to compare learners with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megarl.algorithms.kl import Divergence
from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Experience, Rollouts
from megarl.training.objectives import ActorObjective
from tests.support.heads import REVERSE, plain_divergence
from tests.support.learners import ACTOR, TEMPERATURE
from tests.support.records import experience


def reference_outputs(
    checkpoint: Path,
    objective: ActorObjective = ACTOR,
    batch: Experience | None = None,
    against: Path | None = None,
    named: Mapping[str, Path] | None = None,
    divergence: Divergence = REVERSE,
) -> tuple[PolicyOutputs, float, dict[str, float]]:
    """Return outputs, gradient norm and metrics of an objective by `transformers` and autograd."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = experience() if batch is None else batch
    paths: dict[str | None, Path] = {None: against or checkpoint, **(named or {})}
    others = {
        source: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
        for source, path in paths.items()
    }
    outputs = outputs_of(model, batch, others, divergence=divergence)
    loss, metrics = objective(outputs, batch, Totals.of(batch.num_learnt()))
    loss.backward()
    return outputs, gradient_norm(model), {name: float(value) for name, value in metrics.items()}


def outputs_of(
    model: Any,
    batch: Rollouts,
    others: Mapping[str | None, Any],
    *,
    temperature: float = TEMPERATURE,
    divergence: Divergence = REVERSE,
) -> PolicyOutputs:
    """Return the outputs of a `transformers` model and its divergence from another, sequence by sequence.

    `others` are models by data source; None is that of all other data sources.
    """
    log_probs, entropy, kl = [], [], []
    for sample in range(len(batch)):
        prompt, response = list(batch.prompt_of(sample).token_ids), batch.response_ids(sample).tolist()
        other = others.get(batch.prompt_of(sample).data_source, others[None])
        log_p, log_q = (
            (policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            for policy in (model, other)
        )
        log_probs.append(log_p[torch.arange(len(response)), torch.tensor(response, dtype=torch.int64)])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
        kl.append(plain_divergence(log_p, log_q, divergence))
    return PolicyOutputs(log_probs=torch.cat(log_probs), entropy=torch.cat(entropy), kl=torch.cat(kl))


def gradient_norm(model: Any) -> float:
    """Return the norm of all gradients of a model together."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())
