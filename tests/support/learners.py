"""Learners on tiny checkpoints: in float32, over all ranks of a test."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Rollouts
from megarl.config.policy import ActorSection, CriticSection
from megarl.learner.config import MegatronSection, OptimSection
from megarl.planning.states import States
from megarl.training.objectives import ActorObjective, CriticObjective
from tests.support.heads import REVERSE
from tests.support.ranks import fresh_mesh
from tests.support.records import experience

OPTIM = OptimSection(lr=1e-3)
NUM_SCHEDULE_STEPS = 10
WARM_UP = OptimSection(lr=1e-3, lr_warmup_steps=4)
TEMPERATURE = 0.8
ACTOR = ActorObjective(ActorSection(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1), horizon=8)
CRITIC = CriticObjective(CriticSection(), horizon=8)
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def make_test_learner(
    checkpoint: Path,
    split: dict[str, Any],
    *,
    role: Any = "policy",
    temperature: float = 1.0,
    optim: OptimSection | None = OPTIM,
    grad_clip: float = 1.0,
    balance: bool = True,
    mesh: Any = None,
    recompute: Any = False,
    freeze_routers: bool = False,
    lora: Any = None,
    base: Any = None,
    replays: Any = "none",  # of megarl.learner.batching.Replays
) -> Any:
    """Return this rank's part of a model whose MegatronSection has the fields `split`; without `optim` it only infers.

    `mesh` is the mesh of another learner of the same split. None makes a new mesh, which ends earlier learners.
    """
    from megarl.learner.factory import make_learner  # Megatron is slow to import
    from megarl.models.hub import read_model

    section = MegatronSection(**{"dtype": "float32"} | split)
    return make_learner(
        checkpoint,
        read_model(checkpoint, {})[1],
        section,
        mesh or fresh_mesh(section),
        role=role,
        temperature=temperature,
        balance=balance,
        recompute=recompute,
        training=(optim, grad_clip, NUM_SCHEDULE_STEPS) if optim else None,
        freeze_routers=freeze_routers,
        lora=lora,
        base=base,
        replays=replays,
    )


def states_of(learner: Any) -> States:
    """Return the bytes of all storages that a learner holds on to."""
    from megarl.learner.optimizer import torch_optimizers

    weights = storages(parameter for module in learner.modules for parameter in module.parameters())
    if learner.optimizer is None:
        return States(weights=sum(weights.values()))
    buffers = [buffer for model in learner.models for buffer in model.buffers + model.expert_parallel_buffers]
    gradients = storages(buffer.grad_data for buffer in buffers)
    state = {}
    for optimizer in torch_optimizers(learner.optimizer.megatron):
        state |= storages(parameter for group in optimizer.param_groups for parameter in group["params"])
        state |= storages(value for values in optimizer.state.values() for value in values.values())
    return States(
        weights=sum(weights.values()),
        gradients=sum(gradients.values()),
        optimizer=sum(size for storage, size in state.items() if storage not in weights),
    )


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the memory behind the tensors, by its address; tensors may share it."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def value_head(hidden_size: int) -> Tensor:
    """Return the head of the value models of these tests: [1, hidden_size], random."""
    return torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(2))


def draw_head(learner: Any) -> None:
    """Give a value model `value_head` instead of zeros."""
    if learner.mesh.is_last_stage:
        head = learner.modules[-1].output_layer.weight
        with torch.no_grad():
            head.copy_(value_head(head.shape[1]))


def outputs_of_all(learner: Any, batch: Rollouts, budget: Any, **options: Any) -> Any:
    """Return a model's outputs on a batch that every rank has, on every rank. `options` are those of `infer`."""
    spread = learner.spread(batch)
    return gathered(spread, learner.infer(spread, budget, **options))


def gathered(batch: Any, outputs: Any) -> Any:
    """Return a model's outputs on each share of a batch as those on the whole batch, on every rank."""
    if isinstance(outputs, torch.Tensor):
        return batch.gather_tokens(outputs).float()
    columns = {each.name: getattr(outputs, each.name) for each in fields(outputs)}
    return PolicyOutputs(
        **{name: column if column is None else batch.gather_tokens(column).float() for name, column in columns.items()}
    )


def update(
    learner: Any,
    minibatches: Iterable[Rollouts],
    objective: Any,
    budget: Any,
    *,
    against: Any = None,
    extra_terms: Iterable[Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Take an optimizer step on each mini-batch, with `options` of `update`; `extra_terms` are added one by one."""
    from megarl.learner.terms import LossTerm
    from megarl.training import updates

    extra = [[term] for term in extra_terms or ()]
    together = budget.num_together
    steps = [
        [LossTerm(batch=learner.spread(batch, num_together=together), objective=objective, against=against), *more]
        for batch, more in zip_longest(minibatches, extra, fillvalue=())
    ]
    return updates.update(learner, steps, budget, **options)


def sizes(tp: int, pp: int) -> dict[str, Any]:
    """Return the fields of a MegatronSection for a tensor- and pipeline-parallel size."""
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}


def learner_outputs(
    checkpoint: Path,
    role: str,
    split: dict[str, Any],
    max_tokens: int,
    objective: Any = None,
    against: Path | None = None,
    named: Mapping[str, Path] | None = None,
    divergence: Divergence = REVERSE,
) -> dict[str, Any]:
    """On each rank: infer, update and infer again; compare with the policy `against`, if given, and with those `named`.

    The policies that are `named` read the samples of their data source.
    """
    from megarl.learner.batching import Budget
    from megarl.learner.forward import ReferenceDivergence
    from megarl.learner.per_data_source import PerDataSource

    learner = make_test_learner(checkpoint, split, role=role, temperature=TEMPERATURE)
    other = None
    if against:
        rest, *others = (
            make_test_learner(path, split, temperature=TEMPERATURE, optim=None, mesh=learner.mesh).forward
            for path in (against, *(named or {}).values())
        )
        policies = PerDataSource(named=dict(zip(named or {}, others, strict=True)), other=rest)
        other = ReferenceDivergence(policies=policies, divergence=divergence)
    if role == "value":
        draw_head(learner)
    batch, budget = experience(), Budget(max_tokens=max_tokens, max_sequences=None)
    before = outputs_of_all(learner, batch, budget, against=other, with_entropy=True)
    objective = objective or (ACTOR if role == "policy" else CRITIC)
    metrics = update(learner, [batch], objective, budget, against=other)
    after = outputs_of_all(learner, batch, budget, against=other, with_entropy=True)
    return {"before": before, "metrics": metrics, "after": after}


def learn_twice(
    source: Path,
    role: str,
    split: dict[str, Any],
    save: Path | None,
    load: Path | None,
    optimizer: bool,
    optim: OptimSection = WARM_UP,
    lora: Any = None,
    freeze_routers: bool = False,
) -> Any:
    """On each rank: update twice and save in between, or load and update once; return the last metrics and outputs.

    The save is written after the second update, and must hold the state before it.
    """
    from megarl.learner.batching import Budget
    from megarl.learner.checkpoint import load_learner, save_learner
    from megarl.learner.staging import Staging

    split = split | {"use_distributed_optimizer": optimizer}
    learner = make_test_learner(source, split, role=role, optim=optim, lora=lora, freeze_routers=freeze_routers)
    batch, budget = experience(), Budget(max_tokens=100, max_sequences=None)
    objective = ACTOR if role == "policy" else CRITIC
    if load:
        load_learner(learner, load)
    else:
        update(learner, [batch], objective, budget)
    writing = save_learner(learner, save, Staging()) if save else None
    metrics = update(learner, [batch], objective, budget)
    if writing:
        writing.write()
        writing.finish()
    outputs = outputs_of_all(learner, batch, budget)
    return metrics, outputs if role == "value" else outputs.log_probs
