"""Each pipeline stage gets the tokens that its layers read, and all stages together learn what one rank learns.

The loop takes its own step with real models. Every rank draws some of the samples. A rank of the first stage then holds
the tokens of prompts and responses, a rank between holds no token, and a rank of the last stage holds all columns.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms.config import AlgorithmSection, KLControlSection, PolicyLossSection, RolloutCorrectionSection
from megarl.batch import PER_READ, PER_TOKEN, Rollouts, Scored
from megarl.config.policy import ActorSection, CriticSection
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded, Shares, shard
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.samples.store import SampleStore
from tests.support.layouts import slices
from tests.support.learners import OPTIM, draw_head, make_test_learner, sizes
from tests.support.ranks import RankPool
from tests.support.records import experience

pytestmark = pytest.mark.ranks

CHECKPOINTS = {name: (name, {"num_hidden_layers": 4}) for name in ("llama", "qwen3_moe")}
COMPARED = AlgorithmSection(adv_estimator="grpo", use_kl_in_reward=False)
ALGORITHMS = {
    "compared": (COMPARED, PolicyLossSection(), 2),
    "critic": (
        AlgorithmSection(
            adv_estimator="gae",
            use_kl_in_reward=True,
            kl_ctrl=KLControlSection(kl_coef=0.1),
            mask_truncated_completions=True,
            rollout_correction=RolloutCorrectionSection(rollout_is="token", rollout_rs="sequence"),
        ),
        PolicyLossSection(loss_mode="clip_cov", clip_cov_ratio=0.5, clip_cov_lb=0.0, clip_cov_ub=100.0),
        4,
    ),
    "complete batch": (
        replace(COMPARED, adv_estimator="reinforce_plus_plus_baseline"),
        PolicyLossSection(loss_mode="kl_cov", kl_cov_ratio=0.2),
        4,
    ),
}
SPLITS = {
    "pipeline": sizes(1, 4),
    "virtual, data": sizes(1, 2) | {"virtual_pipeline_model_parallel_size": 2},
    "tensor": sizes(2, 2),
}
TOKEN_BYTES, READ_BYTES, SAMPLE_BYTES = 13, 4, 5  # of the columns that the actor takes


def drawn() -> Scored:
    """Return four prompts with two samples each; two responses are truncated."""
    batch = experience()
    values = {each.name: getattr(batch, each.name) for each in fields(Rollouts)}
    values["truncated"] = torch.arange(len(batch)) % 4 == 1
    scores = torch.arange(len(batch)) % 3 / 2
    versions = torch.zeros_like(batch.responses)
    return Scored(**values | {"weight_versions": versions}, scores=scores, accuracies=scores, texts=[""] * len(batch))


def held(samples: Sharded[Any]) -> dict[str, int]:
    """Return the bytes of this rank's columns of tokens."""
    columns = {mark: 0 for mark in (PER_TOKEN, PER_READ)}
    for each in fields(samples.share):
        column = getattr(samples.share, each.name)
        if isinstance(column, Tensor) and columns.keys() & each.metadata.keys():
            columns[next(iter(each.metadata))] += column.untyped_storage().nbytes()
    return columns


@dataclass(frozen=True)
class Learnt:
    """Results of one rank."""

    metrics: dict[str, float]
    weights: dict[str, list[tuple[str, Any, Tensor]]]  # pieces of each model
    held: dict[str, int]
    received: int  # bytes, until the samples are taken


def taken(actor: Any, samples: Sharded[Any]) -> tuple[dict[str, int], int]:
    """Return what a rank holds of the samples that the actor has taken, and the bytes that it received for them."""
    received = list[int]()
    irecv, recv = dist.irecv, dist.recv

    def noted(receive: Any, content: Tensor, *args: Any, **options: Any) -> Any:
        received.append(content.nbytes)
        return receive(content, *args, **options)

    with patch.multiple(dist, irecv=lambda *a, **o: noted(irecv, *a, **o), recv=lambda *a, **o: noted(recv, *a, **o)):
        found = held(actor.take(samples, step=0))
    return found, sum(received)


def pieces_of(learner: Any) -> list[tuple[str, Any, Tensor]]:
    """Return names, boxes and copies of the parameters of a rank."""
    with learner.weights() as tensors:
        return [(piece.name, piece.box, piece.view(tensors[piece.param]).clone()) for piece in learner.layout()]


def learnt(
    checkpoint: Path, split: dict[str, Any], name: str, keeps_routes: bool, directory: Path | None = None
) -> Learnt:
    """Take one step with an actor, a reference and perhaps a critic. Return what this rank learnt.

    With a directory the step is a replay: it learns from files of the samples there, which are first kept if absent.
    """
    from megarl.algorithms.kl import FixedKL
    from megarl.learner.batching import Budget
    from megarl.tracking.protocol import NullTracker
    from megarl.tracking.timers import Timers
    from megarl.training.collect import Collected
    from megarl.training.flops import FlopsCounter
    from megarl.training.loop import Job, Progress, take_step
    from megarl.training.marks import mark
    from megarl.training.minibatches import MiniBatches
    from megarl.training.objectives import ActorObjective, CriticObjective
    from megarl.training.replay import Replay
    from megarl.training.roles import Model, Updates
    from megarl.training.steps import Schedule

    algorithm, policy_loss, num_prompts = ALGORITHMS[name]
    budget = Budget(max_tokens=64, max_sequences=None)
    replays: Any = "experts" if keeps_routes else "none"
    learner = make_test_learner(checkpoint, split, replays=replays)
    reference = make_test_learner(checkpoint, split, optim=None, mesh=learner.mesh)

    def updates(objective: Any, prepare: Any = None) -> Updates:
        cut = MiniBatches(num_prompts=num_prompts, num_epochs=1, shuffle=True, seed=1)
        return Updates(objective=objective, budget=budget, minibatches=cut, prepare=prepare)

    section = ActorSection(policy_loss=policy_loss, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    actor = Model[Any](
        name="actor",
        learner=learner,
        budget=budget,
        updates=updates(ActorObjective(section, horizon=8), lambda batch: mark(batch, policy_loss)),
        with_entropy=True,
        keeps_routes=keeps_routes,
    )
    critic = None
    if algorithm.estimator.critic:
        values = make_test_learner(checkpoint, split, role="value", mesh=learner.mesh, optim=OPTIM)
        draw_head(values)
        objective = CriticObjective(CriticSection(), horizon=8)
        critic = Model[Any](name="critic", learner=values, budget=budget, updates=updates(objective))
    record = drawn()
    samples = shard(record, torch.arange(len(record)) % dist.get_world_size(), Shares.blocks(1))
    found = taken(actor, samples)
    source: Any = Mock()
    source.collect.return_value = Collected(scored=samples, baselines=None, position=Position(), metrics={})
    if directory:
        SampleStore(directory, replaces=False).save_step(samples, None, step=1)
        source = Replay.find(directory, after=0)
    job = Job(
        samples=source,
        actor=actor,
        reference=Model[Any](name="reference", learner=reference, budget=budget),
        critic=critic,
        gate=None,
        algorithm=algorithm,
        critic_warmup=0,
        schedule=Schedule(first_step=0, last_step=1, test_freq=-1, save_freq=-1),
        validation=None,
        checkpoints=Mock(),
        tracker=NullTracker(),
        num_ranks=dist.get_world_size(),
        flops=FlopsCounter(),
    )
    metrics, _ = take_step(job, Progress(kl=FixedKL(0.1), position=Position()), Timers(), step=0)
    weights = {model.name: pieces_of(model.learner) for model in ([actor, critic] if critic else [actor])}
    return Learnt(metrics, weights, *found)


CASES = [
    ("pipeline", "compared", "llama"),
    ("pipeline", "critic", "llama"),
    ("pipeline", "complete batch", "llama"),
    ("virtual, data", "critic", "llama"),
    ("tensor", "critic", "llama"),
    ("pipeline", "compared", "qwen3_moe"),
]


@pytest.mark.parametrize(("split", "algorithm", "variant"), CASES)
def test_stages_learn_what_one_rank_learns(
    pool: RankPool, checkpoints: dict[str, Path], split: str, algorithm: str, variant: str
) -> None:
    checkpoint, keeps_routes = checkpoints[variant], variant == "qwen3_moe"
    [alone] = pool.run(1, learnt, checkpoint, {}, algorithm, keeps_routes)
    start = load_file(checkpoint / "model.safetensors")
    shapes = hf_shapes(read_architecture(json.loads((checkpoint / "config.json").read_text())))
    whole = {model: {name: torch.full(shape, torch.nan) for name, shape in shapes.items()} for model in alone.weights}
    for model, pieces in alone.weights.items():
        for name, box, values in pieces:
            whole[model].setdefault(name, torch.full(box.shape, torch.nan))[slices(box)] = values
    for rank, found in enumerate(pool.run(4, learnt, checkpoint, SPLITS[split], algorithm, keeps_routes)):
        names = [name for name in alone.metrics if not name.startswith("perf/")]
        assert {name: found.metrics[name] for name in names} == pytest.approx(
            {name: alone.metrics[name] for name in names}, rel=1e-3, abs=1e-4
        )
        for model, pieces in found.weights.items():
            assert pieces
            for name, box, values in pieces:
                theirs = whole[model][name][slices(box)]
                before = start[name][slices(box)] if name in start else torch.zeros_like(theirs)
                # Adam's first step has the size of the learning rate even if the gradient is nearly zero, so the
                # tolerance applies to tensors.
                assert (values - theirs).norm() <= 1e-2 * (theirs - before).norm(), f"rank {rank}: {model}, {name}"


@pytest.mark.parametrize("split", ["virtual, data", "tensor"])
def test_replay_learns_bit_for_bit_the_same(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, split: str
) -> None:
    """Also if one rank kept the samples; with several, each reads those rows that another has drawn."""
    arguments = checkpoints["llama"], SPLITS[split], "critic", False
    pool.run(1, learnt, checkpoints["llama"], {}, "critic", False, tmp_path / "one")
    expected = pool.run(4, learnt, *arguments)
    for name in ("one", "four"):
        for found, step in zip(pool.run(4, learnt, *arguments, tmp_path / name), expected, strict=True):
            metrics = {key for key in step.metrics if not key.startswith("perf/")}
            assert {key: found.metrics[key] for key in metrics} == {key: step.metrics[key] for key in metrics}
            for model, pieces in step.weights.items():
                for (_, _, ours), (_, _, theirs) in zip(found.weights[model], pieces, strict=True):
                    assert torch.equal(ours, theirs)


def test_tokens_travel_to_the_stages_that_read_them(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    """Rank 3 of a pipeline of 4 learns; it gets what it has not drawn, and passes on what the others need."""
    record = drawn()
    results = pool.run(4, learnt, checkpoints["llama"], SPLITS["pipeline"], "compared", False)
    responses, read = int(record.num_tokens.sum()), int(record.lengths().sum())
    drawn_by_last = int(record.num_tokens[3::4].sum())
    numbers = SAMPLE_BYTES * len(record)
    assert [found.held for found in results] == [
        {PER_TOKEN: 0, PER_READ: READ_BYTES * read},
        {PER_TOKEN: 0, PER_READ: 0},
        {PER_TOKEN: 0, PER_READ: 0},
        {PER_TOKEN: TOKEN_BYTES * responses, PER_READ: 0},
    ]
    assert [found.received for found in results] == [
        numbers + READ_BYTES * responses,
        numbers,
        numbers,
        numbers * 3 // 4 + TOKEN_BYTES * (responses - drawn_by_last),
    ]
