"""A fault between two syncs is caught in the iteration in which it happens, before anything learns.

A real trainer and a real engine, tensor-parallel over two ranks, run the loop's own iteration. Weights change by a real
update in between. As a failing iteration changes nothing, one start serves all faults, one after the other, and in the
end a sound iteration passes. Self-checks are off: the gate is alone.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Prompts, Rollouts, Scored
from megarl.data.order import Position
from tests.support.engines import prompt, start, tear_down, tensors_of
from tests.support.pairs import Pair, swap
from tests.support.ranks import RankPool, fresh_mesh
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.ranks

NUM_RANKS = 2
# More than a block of the prefix cache, so that keys which outlive a sync are met.
PROMPTS = [prompt(number, [*range(3 + number, 133 + number)]) for number in range(8)]
DRAWN = {"n": 4, "response_length": 24, "tensor_model_parallel_size": 2}
FAULTS = (
    "kept prefix cache",  # first: its keys are of the weights before the update
    "stale layer",
    "stale shard",
    "experts exchanged",
    "q and k exchanged",
    "another temperature",
)


class Data:
    """The same prompts again and again; a response is as good as its tokens are even."""

    def take(self, position: Position) -> tuple[Prompts, Position]:
        return Prompts(prompts=PROMPTS), position

    def score(self, rollouts: Rollouts) -> tuple[Scored, dict[str, float]]:
        scores = ((rollouts.responses % 2 == 0) & rollouts.mask).sum(-1) / rollouts.mask.sum(-1)
        return rollouts.extend(Scored, texts=[""] * len(rollouts), scores=scores, accuracies=scores), {}


def snapshot(learner: Any) -> dict[str, torch.Tensor]:
    with learner.weights() as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def sending(old: dict[str, torch.Tensor], is_stale: Callable[[str], bool]) -> AbstractContextManager[Any]:
    """Some of what a rank sends is from before the update."""
    from megarl.learner.learner import Learner

    weights = Learner.weights

    @contextmanager
    def weights_of_both(learner: Any) -> Iterator[dict[str, torch.Tensor]]:
        with weights(learner) as tensors:
            yield {name: old[name] if is_stale(name) else tensor for name, tensor in tensors.items()}

    return patch.object(Learner, "weights", weights_of_both)


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    complaints: dict[str, str]  # by fault
    learnt: list[str]  # faults after whose iteration the weights were others
    first: dict[str, float]  # metrics of the sound iterations
    last: dict[str, float]


def iterations(checkpoint: Path, dtype: str) -> Seen:
    from megarl.algorithms.config import AlgorithmSection
    from megarl.algorithms.kl import FixedKL
    from megarl.config.policy import ActorSection
    from megarl.learner.batching import Budget
    from megarl.learner.config import MegatronSection, OptimSection
    from megarl.learner.factory import make_learner
    from megarl.models.architecture import read_architecture
    from megarl.rollout.config import RolloutSection, SyncSection
    from megarl.rollout.limits import Limits
    from megarl.tracking.timers import Timers
    from megarl.tracking.tracker import NullTracker
    from megarl.training.collect import Collector
    from megarl.training.gate import Gate, MismatchError
    from megarl.training.loop import Job, Progress, take_step
    from megarl.training.objectives import ActorObjective
    from megarl.training.roles import EngineSampler, Model, Updates
    from megarl.training.steps import Schedule

    engine = start(checkpoint, tensors_of(checkpoint), tp_size=2, dtype=dtype, max_num_seqs=32, free_cache_engine=False)
    megatron = MegatronSection(dtype=dtype, tensor_model_parallel_size=2)
    learner = make_learner(
        checkpoint,
        read_architecture(json.loads((checkpoint / "config.json").read_text())),
        megatron,
        fresh_mesh(megatron),
        role="policy",
        device=torch.device("cpu"),
        training=(OptimSection(lr=1e-3), 1.0, 10),
    )
    pair, budget, algorithm = (
        Pair(learner, engine),
        Budget(max_tokens=2000, max_sequences=None),
        AlgorithmSection(adv_estimator="grpo", use_kl_in_reward=False),
    )
    section = RolloutSection(dtype=dtype, **DRAWN)

    def sampler(new_name: Callable[[str], str] = lambda name: name, temperature: float = 1.0) -> Any:
        return EngineSampler(
            engine=engine,
            sync=pair.sync(new_name, check=Mock(is_due=Mock(return_value=False))),
            section=replace(section, temperature=temperature),
            finished=lambda prompt, token_ids: None,
        )

    def job(sampler: Any) -> Job:
        return Job(
            samples=Collector(prompts=Data(), sampler=sampler, scorer=Data(), algorithm=algorithm),
            actor=Model(
                name="actor",
                learner=learner,
                budget=budget,
                updates=Updates(
                    objective=ActorObjective(ActorSection(), horizon=24),
                    budget=budget,
                    num_prompts=2,
                    num_epochs=1,
                    shuffle=False,
                    seed=1,
                ),
            ),
            reference=None,
            critic=None,
            gate=Gate(limits=Limits.of(SyncSection(), dtype)),
            algorithm=algorithm,
            critic_warmup=0,
            schedule=Schedule(first_step=0, last_step=2, test_freq=-1, save_freq=-1),
            validation=None,
            checkpoints=Mock(),
            tracker=NullTracker(),
            num_ranks=2,
        )

    old = snapshot(learner)
    first, progress = take_step(job(sampler()), Progress(kl=FixedKL(0.0), position=Position(0, 0)), Timers(), step=0)
    before, complaints, learnt = snapshot(learner), {}, []
    plants = {
        "kept prefix cache": lambda: patch.object(engine._llm, "reset_prefix_cache", return_value=True),
        "stale layer": lambda: sending(old, lambda name: "layers.1." in name),
        "stale shard": lambda: sending(old, lambda name: dist.get_rank() == 1),
    }
    samplers = {
        "experts exchanged": {"new_name": swap(".experts.0.", ".experts.1.")},
        "q and k exchanged": {"new_name": swap("q_proj", "k_proj")},
        "another temperature": {"temperature": 0.7},
    }
    for fault in FAULTS:
        with plants.get(fault, nullcontext)():
            try:
                metrics, _ = take_step(job(sampler(**samplers.get(fault, {}))), progress, Timers(), step=1)
                complaints[fault] = f"passed with {metrics['training/rollout_mismatch']}"
            except MismatchError as error:
                complaints[fault] = str(error)
        if not all(torch.equal(tensor, before[name]) for name, tensor in snapshot(learner).items()):
            learnt.append(fault)
    last, _ = take_step(job(sampler()), progress, Timers(), step=1)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in snapshot(learner).items()), "it learns again"
    tear_down(engine)
    return Seen(complaints, learnt, first, last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_is_caught_in_its_own_iteration_and_nothing_learns_from_it(
    pool: RankPool, tmp_path: Path, dtype: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3_moe", num_key_value_heads=4)
    for seen in pool.run(NUM_RANKS, iterations, checkpoint, dtype):
        for fault in FAULTS:
            assert seen.complaints[fault].startswith("the engine did not draw the samples of step 2"), fault
        assert seen.learnt == []
        for metrics in (seen.first, seen.last):
            assert metrics["training/rollout_mismatch"] < metrics["training/rollout_mismatch_limit"]
            assert metrics["training/rollout_mismatch_left_out"] == 0.0
