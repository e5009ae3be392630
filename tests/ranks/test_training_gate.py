"""A fault between two syncs is caught in its own step, before anything learns.

A real learner and a real engine, tensor-parallel over two ranks, take the loop's own steps, and a real update changes
the weights in between. The actor reads the samples before its update, and then in the pass that learns. A step that
fails changes nothing, so that one start serves all faults, and a sound step passes at the end. Self-checks are off:
only the gate looks.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Prompts, Rollouts, Scored
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded
from tests.support.engines import prompt, start, tear_down
from tests.support.pairs import Pair, swap
from tests.support.ranks import RankPool, fresh_mesh
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.ranks

# More than a block of the prefix cache, so that keys which outlive a sync are read.
PROMPTS = [prompt(number, [*range(3 + number, 133 + number)]) for number in range(8)]
DRAWN = {"n": 4, "response_length": 24, "tensor_model_parallel_size": 2}
FAULTS = (
    "kept prefix cache",  # first, because its keys belong to the weights before the update
    "stale layer",
    "stale shard",
    "experts exchanged",
    "q and k exchanged",
    "another temperature",
)


class Data:
    """The same prompts in every step; the score of a response is its share of even tokens."""

    def take(self, position: Position) -> tuple[Prompts, Position]:
        return Prompts(prompts=PROMPTS), position

    def forget(self) -> None:
        pass

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], dict[str, float]]:
        share = samples.share
        scores = (share.sums(share.responses % 2 == 0) / share.num_tokens).to(torch.float32)
        scored = share.extend(Scored, texts=[""] * len(share), scores=scores, accuracies=scores)
        return samples.with_share(scored), {}


def snapshot(learner: Any) -> dict[str, torch.Tensor]:
    with learner.weights() as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def sending(old: dict[str, torch.Tensor], is_stale: Callable[[str], bool]) -> AbstractContextManager[Any]:
    """Make a rank send old tensors for the names that `is_stale` accepts."""
    from megarl.learner.learner import Learner

    weights = Learner.weights

    @contextmanager
    def weights_of_both(learner: Any) -> Iterator[dict[str, torch.Tensor]]:
        with weights(learner) as tensors:
            yield {name: old[name] if is_stale(name) else tensor for name, tensor in tensors.items()}

    return patch.object(Learner, "weights", weights_of_both)


@dataclass(frozen=True)
class Seen:
    """Results of one rank."""

    complaints: dict[tuple[str, int], str]  # by fault and step
    learnt: list[tuple[str, int]]  # faults and steps after which the weights had changed
    sound: list[dict[str, float]]  # metrics of the sound steps


class World:
    """A learner and an engine over both ranks, and the jobs that use them."""

    def __init__(self, checkpoint: Path, dtype: Any) -> None:
        from megarl.algorithms.config import AlgorithmSection
        from megarl.learner.config import MegatronSection, OptimSection
        from megarl.learner.factory import make_learner
        from megarl.models.architecture import read_architecture
        from megarl.rollout.config import RolloutSection

        settings = {"dtype": dtype, "max_num_seqs": 32, "free_cache_engine": False}
        self.engine = start(checkpoint, tp_size=2, **settings)
        megatron = MegatronSection(dtype=dtype, tensor_model_parallel_size=2)
        self.learner = make_learner(
            checkpoint,
            read_architecture(json.loads((checkpoint / "config.json").read_text())),
            megatron,
            fresh_mesh(megatron),
            role="policy",
            training=(OptimSection(lr=1e-3), 1.0, 10),
        )
        self.section = RolloutSection(dtype=dtype, **DRAWN)
        self.algorithm = AlgorithmSection(adv_estimator="grpo", use_kl_in_reward=False)

    def sampler(self, new_name: Callable[[str], str] = lambda name: name, temperature: float = 1.0) -> Any:
        """Return a sampler whose syncs are not checked."""
        from megarl.training.roles import EngineSampler

        return EngineSampler(
            engine=self.engine,
            sync=Pair(self.learner, self.engine).sync(new_name, check=Mock(is_due=Mock(return_value=False))),
            section=replace(self.section, temperature=temperature),
            finished=lambda prompt, token_ids: None,
        )

    def updates(self, budget: Any, num_prompts: int) -> Any:
        """Return real updates of `num_prompts` prompts each."""
        from megarl.config.policy import ActorSection
        from megarl.training.minibatches import MiniBatches
        from megarl.training.objectives import ActorObjective
        from megarl.training.roles import Updates

        objective = ActorObjective(ActorSection(), horizon=24)
        cut = MiniBatches(num_prompts=num_prompts, num_epochs=1, shuffle=False, seed=1)
        return Updates(objective=objective, budget=budget, minibatches=cut)

    def step(self, progress: Any, step: int, *, in_one_pass: bool, **sampler: Any) -> tuple[dict[str, float], Any]:
        """Take the loop's own step with a sampler of these settings. In one pass, the actor takes only one update."""
        from megarl.learner.batching import Budget
        from megarl.rollout.config import SyncSection
        from megarl.rollout.limits import Limits
        from megarl.tracking.protocol import NullTracker
        from megarl.tracking.timers import Timers
        from megarl.training.collect import Collector
        from megarl.training.flops import FlopsCounter
        from megarl.training.gate import Gate
        from megarl.training.loop import Job, take_step
        from megarl.training.roles import Model
        from megarl.training.steps import Schedule

        budget, data = Budget(max_tokens=2000, max_sequences=None), Data()
        updates = self.updates(budget, len(PROMPTS) if in_one_pass else 2)
        job = Job(
            samples=Collector(prompts=data, sampler=self.sampler(**sampler), scorer=data, algorithm=self.algorithm),
            actor=Model(name="actor", learner=self.learner, budget=budget, updates=updates, with_entropy=True),
            reference=None,
            critic=None,
            gate=Gate(limits=Limits.of(SyncSection(), self.section.dtype)),
            algorithm=self.algorithm,
            critic_warmup=0,
            schedule=Schedule(first_step=0, last_step=2, test_freq=-1, save_freq=-1),
            validation=None,
            checkpoints=Mock(),
            tracker=NullTracker(),
            num_ranks=2,
            fused_old_log_probs=in_one_pass,
            flops=FlopsCounter(),
        )
        return take_step(job, progress, Timers(), step=step)

    def has_weights(self, expected: dict[str, torch.Tensor]) -> bool:
        """Return whether the learner's weights are these."""
        return all(torch.equal(tensor, expected[name]) for name, tensor in snapshot(self.learner).items())


def steps(checkpoint: Path, dtype: str) -> Seen:
    """On each rank: a sound step; then, for both ways to read, a step with each fault and a sound step."""
    from megarl.algorithms.kl import FixedKL
    from megarl.training.gate import MismatchError
    from megarl.training.loop import Progress

    world = World(checkpoint, dtype)
    old = snapshot(world.learner)
    metrics, progress = world.step(Progress(kl=FixedKL(0.0), position=Position(0, 0)), 0, in_one_pass=False)
    seen = Seen({}, [], [metrics])
    plants = {
        "kept prefix cache": lambda: patch.object(world.engine._llm, "reset_prefix_cache", return_value=True),
        "stale layer": lambda: sending(old, lambda name: "layers.1." in name),
        "stale shard": lambda: sending(old, lambda name: dist.get_rank() == 1),
    }
    samplers: dict[str, dict[str, Any]] = {
        "experts exchanged": {"new_name": swap(".experts.0.", ".experts.1.")},
        "q and k exchanged": {"new_name": swap("q_proj", "k_proj")},
        "another temperature": {"temperature": 0.7},
    }
    for step, in_one_pass in ((1, False), (2, True)):
        before = snapshot(world.learner)
        for fault in FAULTS:
            with plants.get(fault, nullcontext)():
                try:
                    metrics, _ = world.step(progress, step, in_one_pass=in_one_pass, **samplers.get(fault, {}))
                    seen.complaints[fault, step] = f"passed with {metrics['training/rollout_mismatch']}"
                except MismatchError as error:
                    seen.complaints[fault, step] = str(error)
            if not world.has_weights(before):
                seen.learnt.append((fault, step))
        metrics, progress = world.step(progress, step, in_one_pass=in_one_pass)
        seen.sound.append(metrics)
        assert not world.has_weights(before), "it learns again"
    tear_down(world.engine)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_catches_fault_in_its_step_before_updates(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3_moe", num_key_value_heads=4)
    for seen in pool.run(2, steps, checkpoint, dtype):
        for fault, step in product(FAULTS, (1, 2)):
            drawn = f"the engine did not draw the samples of step {step + 1}"
            assert seen.complaints[fault, step].startswith(drawn), (fault, step)
        assert seen.learnt == []
        for metrics in seen.sound:
            assert metrics["training/rollout_mismatch"] < metrics["training/rollout_mismatch_limit"]
            assert metrics["training/rollout_mismatch_left_out"] == 0.0
