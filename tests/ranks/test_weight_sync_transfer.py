"""Shard to shard: whatever the trainer's split, the engine samples from the very weights that the trainer has now.

Megatron's shards go to vLLM's shards over four processes; the engine's log-probabilities of its samples are compared
with the trainer's, at the start and after each of two updates.
"""

import itertools
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.batch import Group, Prompts, Rollouts
from megarl.models.lora import Lora
from megarl.reshard.layout import Layout
from tests.support.engines import PROMPTS, start, tear_down, tensors_of, write_two_checkpoints
from tests.support.layouts import slices
from tests.support.learners import make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import on_all_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS = 4
SPLITS = list(itertools.product((1, 2), (1, 2)))  # trainer's (TP, PP); data-parallel over the rest
BUCKET_BYTES = 64 << 10  # a fraction of the model: several waves
LORA = Lora(rank=4, alpha=4.0)
SAMPLING = {"n": 2, "temperature": 0.7, "response_length": 12}


@dataclass(frozen=True)
class Round:
    """The records of a rank after one sync."""

    rollouts: Rollouts
    log_probs: Tensor  # [N] of the trainer
    log_probs_after_update: Tensor


@dataclass(frozen=True)
class Traffic:
    """The bytes that one sync moves to a rank."""

    received: int
    missing: int  # bytes that the engine's shard needs and the trainer's shard has not
    largest_wave: int
    num_waves: int


def sync_every_split(
    paths: list[Path], engine_tp: int, lora: Lora | None
) -> dict[tuple[int, int], tuple[Traffic, list[Round]]]:
    """On each rank: one engine, and one trainer after another that fills it."""
    first, _, bare = paths
    engine = start(bare, tp_size=engine_tp, **SAMPLING)
    answers = {split: sync_one_split(first, engine, *split, lora) for split in SPLITS}
    tear_down(engine)
    return answers


def sync_one_split(checkpoint: Path, engine: Any, tp: int, pp: int, lora: Lora | None) -> tuple[Traffic, list[Round]]:
    from megarl.distributed.exchange import together
    from megarl.learner.batching import Budget
    from megarl.learner.config import OptimSection
    from megarl.models.architecture import hf_shapes
    from megarl.reshard.executor import Reshard
    from megarl.reshard.planner import plan_between
    from megarl.rollout.config import RolloutSection, SyncSection
    from megarl.rollout.limits import Limits
    from megarl.tracking.timers import Timers
    from megarl.training.objectives import SFTObjective
    from megarl.training.roles import EngineSampler
    from megarl.weight_sync.selfcheck import SelfCheck
    from megarl.weight_sync.transfer import Sync

    split = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    optim = OptimSection(lr=0.1 if lora else 1e-2)
    learner = make_test_learner(checkpoint, split, temperature=SAMPLING["temperature"], optim=optim, lora=lora)
    sources, destinations = together(learner.layout), together(engine.weights.layout)
    rank = torch.distributed.get_rank()
    plan = plan_between(sources, destinations, rank=rank, ranks_per_node=2, bucket_bytes=BUCKET_BYTES)
    budget = Budget(max_tokens=400, max_sequences=None)
    told: list[tuple[int, list[int]]] = []
    check = SelfCheck(Limits.of(SyncSection(logprob_stop=1e-5), "float32"), engine, learner, budget, check_every=3)
    sampler = EngineSampler(
        engine=engine,
        sync=Sync(engine=engine, actor=learner, reshard=Reshard(plan, device=learner.device), check=check),
        section=RolloutSection(tensor_model_parallel_size=engine.tp_size, **SAMPLING),
        finished=lambda prompt, token_ids: told.append((prompt.index, list(token_ids))),
    )
    rounds, asked = [], Prompts(prompts=PROMPTS)
    for step in range(3):
        told.clear()
        with sampler.awake(Timers(), step=step) as metrics:
            rollouts = on_all_ranks(sampler.generate(asked, step=step)[0])
            everywhere = itertools.chain.from_iterable(together(told.copy))
            assert sorted(everywhere) == answers_in(rollouts), "each response is reported on one rank"
            if step == 0 and (tp, pp) == SPLITS[0]:  # the trainer's split has no part in this
                again, greedy = other_samples(sampler, asked, step=step), on_all_ranks(sampler.greedy(asked, step=step))
                assert not torch.equal(again.responses, rollouts.responses)
                assert torch.equal(greedy.responses, on_all_ranks(sampler.validate(asked, step=step)).responses)
        assert bool(metrics) == (step < 2), "checked are the first weights and the first that differ"
        assert rollouts.weight_versions is not None and (rollouts.weight_versions == step).all()
        before = outputs_of_all(learner, rollouts, budget)
        update(learner, [rollouts], SFTObjective(), budget)
        after = outputs_of_all(learner, rollouts, budget)
        rounds.append(Round(rollouts, before.log_probs, after.log_probs))
    waves = [sum(transfer.num_bytes for transfer in wave.receives) for wave in plan.waves]
    missing = missing_bytes(sources[rank], destinations[rank], hf_shapes(learner.architecture))
    assert learner.mesh.tp_size * learner.mesh.pp_size * learner.mesh.dp_size == NUM_RANKS
    return Traffic(plan.bytes_received, missing, max(waves), len(waves)), rounds


def answers_in(rollouts: Rollouts) -> list[tuple[int, list[int]]]:
    """Return the row and the tokens of each response, in order."""
    places = range(len(rollouts))
    return sorted((rollouts.prompt_of(place).index, rollouts.response_ids(place).tolist()) for place in places)


def other_samples(sampler: Any, asked: Prompts, *, step: int) -> Rollouts:
    """Draw other samples of the same prompts in the same step, window by window."""
    session = sampler.open(step=step)
    session.add(dict(enumerate(sampler.groups(asked, step=step, batch=1))))
    complete = dict[int, Group]()
    while session.num_open:
        complete |= session.advance()
    drawn: Rollouts = on_all_ranks(sampler.record([complete[number] for number in sorted(complete)]))
    return drawn


def missing_bytes(source: Layout, destination: Layout, shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of the float32 elements in `destination` and not in `source`, counted one by one."""
    held, needed = ({name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()} for _ in range(2))
    for layout, marks in ((source, held), (destination, needed)):
        for piece in layout:
            marks[piece.name][slices(piece.box)] = True
    return 4 * sum(int((needed[name] & ~held[name]).sum()) for name in shapes)


@pytest.mark.parametrize(
    ("variant", "engine_tp", "lora"),
    [("llama", 1, None), ("llama", 2, None), ("qwen2", 1, None), ("qwen2", 2, None), ("llama", 2, LORA)],
    ids=["llama-1", "llama-2", "qwen2-1", "qwen2-2", "llama-2-adapters"],
)
def test_engine_has_the_trainers_weights_after_every_update(
    pool: RankPool, tmp_path: Path, variant: str, engine_tp: int, lora: Lora | None
) -> None:
    """Adapters are merged on the way: the engine gets the bytes that it would get without them."""
    paths = write_two_checkpoints(tmp_path, variant)
    model_bytes = 4 * sum(prod(tensor.shape) for tensor in tensors_of(paths[0]).values())
    for answers in pool.run(NUM_RANKS, sync_every_split, paths, engine_tp, lora):
        for traffic, rounds in answers.values():
            assert traffic.received == traffic.missing < model_bytes
            assert traffic.largest_wave <= BUCKET_BYTES < model_bytes / 4
            assert traffic.num_waves > 1
            for round_ in rounds:
                assert len(round_.rollouts) == len(PROMPTS) * SAMPLING["n"]
                torch.testing.assert_close(round_.rollouts.rollout_log_probs, round_.log_probs, rtol=0.0, atol=1e-4)
                moved = round_.log_probs_after_update - round_.log_probs
                assert moved.abs().mean() > 0.05  # far more than the tolerance: old weights would show
