"""A mini-batch whose loss or gradient is not finite leaves nothing behind but a note; too many in a row end the run."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Experience
from megarl.data.parquet import write_rows
from megarl.learner.config import OptimSection
from megarl.tracking.jsonl import read_jsonl
from tests.support.learners import ACTOR, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import alone, experience
from tests.support.sentencepieces import train_sentencepiece
from tests.support.supervised import train

CHECKPOINTS = {variant: (variant, {}) for variant in ("qwen2", "deepseek_v3")}
POISON = 7.0  # the score of a sample that spoils its micro-batch
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("qwen2", {"tensor_model_parallel_size": 2}),
    "pipeline": ("qwen2", {"pipeline_model_parallel_size": 2}),
    "data": ("qwen2", {}),  # the sample is on one rank alone
    "data, whole optimizer": ("qwen2", {"use_distributed_optimizer": False}),
    "experts": (
        "deepseek_v3",
        {"expert_model_parallel_size": 2, "override_transformer_config": {"moe_router_bias_update_rate": 0.1}},
    ),
}


PLAIN = replace(ACTOR, section=replace(ACTOR.section, entropy_coeff=0.0))  # a function is given no entropies


def spoilt(
    outputs: PolicyOutputs, micro: Experience, totals: Totals, *, fault: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The actor's objective, with a fault in poisoned samples."""
    loss, metrics = PLAIN(outputs, micro, totals)
    if not bool((micro.scores == POISON).any()):
        return loss, metrics
    if fault == "loss":
        return loss + torch.tensor(float("inf")), metrics  # whose gradient is finite
    if fault == "gradient":
        return loss + (0.0 * outputs.log_probs.sum()).sqrt(), metrics  # the slope of the root at 0
    return loss * float("nan"), {name: value * float("nan") for name, value in metrics.items()}


def minibatches() -> tuple[Experience, Experience, Experience]:
    """Two prompts each; the third sample of the second is poisoned."""
    whole = experience()
    first, second, third = whole.of_prompts([0, 1]), whole.of_prompts([1, 2]), whole.of_prompts([2, 3])
    return first, replace(second, scores=torch.tensor([0.0, 0.0, POISON, 0.0])), third


def state_of(learner: Any) -> dict[str, Tensor]:
    """All that an update may change on this rank."""
    from megarl.learner.optimizer import torch_optimizers

    state = {}
    for number, module in enumerate(learner.modules):
        state |= {
            f"{number} {name}": tensor.clone() for name, tensor in module.state_dict().items() if tensor is not None
        }
    for number, inner in enumerate(torch_optimizers(learner.optimizer.megatron)):
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(parameters):
            state[f"{number} parameter {place}"] = parameter.detach().clone()
            for name, value in inner.state[parameter].items():
                state[f"{number} {name} {place}"] = torch.as_tensor(value).clone()
    return state


def learnt(checkpoint: Path, split: dict[str, Any]) -> dict[str, list[str]]:
    """On one rank: what differs, for each fault, from a learner that never saw the mini-batch."""
    from megarl.learner.batching import Budget

    budget = Budget(max_tokens=1000, max_sequences=1)
    first, bad, third = minibatches()
    sound = make_test_learner(checkpoint, split)
    expected = update(sound, [first, third], PLAIN, budget)
    state, differs = state_of(sound), {}
    for fault in ("loss", "gradient", "both"):
        learner = make_test_learner(checkpoint, split, mesh=sound.mesh)
        before = state_of(learner)
        metrics = update(learner, [first, bad, third], partial(spoilt, fault=fault), budget)
        after = state_of(learner)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
        assert metrics == expected | {"skipped_updates": 1.0}
        assert after.keys() == state.keys()
        differs[fault] = [name for name, tensor in after.items() if not torch.equal(tensor, state[name])]
        assert update(learner, [bad], partial(spoilt, fault=fault), budget).keys() == {
            "skipped_updates",
            "empty_minibatches",
            "idle_minibatches",
            "lr",
        }
    return differs


@pytest.mark.parametrize("name", SPLITS)
def test_a_skipped_mini_batch_might_never_have_been(pool: RankPool, checkpoints: dict[str, Path], name: str) -> None:
    variant, split = SPLITS[name]
    for differs in pool.run(2, learnt, checkpoints[variant], split):
        assert differs == {"loss": [], "gradient": [], "both": []}


def idled(checkpoint: Path, split: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    """On one rank: what differs from a learner that never saw a mini-batch without a gradient, and its metrics."""
    from megarl.learner.batching import Budget

    budget, optim = Budget(max_tokens=1000, max_sequences=1), OptimSection(lr=1e-3, weight_decay=0.5)
    objective = replace(PLAIN, section=replace(PLAIN.section, use_kl_loss=False))
    first, second, third = minibatches()
    idle = replace(second, advantages=torch.zeros_like(second.advantages))
    undisturbed = make_test_learner(checkpoint, split, optim=optim)
    update(undisturbed, [first, third], objective, budget)
    learner = make_test_learner(checkpoint, split, optim=optim, mesh=undisturbed.mesh)
    metrics = update(learner, [first, idle, third], objective, budget)
    before = state_of(learner)
    alone = update(learner, [idle], objective, budget)
    assert (alone["grad_norm"], alone["idle_minibatches"], alone["skipped_updates"]) == (0.0, 1.0, 0.0)
    expected = state_of(undisturbed)
    after = state_of(learner)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    return [name for name, tensor in after.items() if not torch.equal(tensor, expected[name])], metrics


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("name", SPLITS)
def test_mini_batch_without_gradient_changes_no_state(
    pool: RankPool, checkpoints: dict[str, Path], name: str, optimizer: bool
) -> None:
    """Without the rule, momentum and weight decay move the weights."""
    variant, split = SPLITS[name]
    for differs, metrics in pool.run(2, idled, checkpoints[variant], split | {"use_distributed_optimizer": optimizer}):
        assert differs == []
        assert metrics["idle_minibatches"] == 1.0


def stopped(checkpoint: Path, split: dict[str, Any], run_dir: Path) -> tuple[list[float], str]:
    """On one rank: updates skipped in each step until a run with max_skipped_updates=2 ends, and its last words."""
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.batching import Budget
    from megarl.tracking.config import TrainerSection
    from megarl.training.skips import Skips

    learner = make_test_learner(checkpoint, split)
    checkpoints = CheckpointStore(directory=run_dir, learners={"actor": learner}, keep=None)
    skips = Skips("actor", TrainerSection(default_local_dir=str(run_dir), max_skipped_updates=2))
    first, bad, third = minibatches()
    steps, counts = [[first, bad], [bad, first], [third, bad], [bad], [bad, first]], []
    for number, batches in enumerate(steps, start=1):
        try:
            metrics = update(
                learner,
                batches,
                partial(spoilt, fault="both"),
                Budget(max_tokens=1000, max_sequences=1),
                skips=skips,
                step=number - 1,
            )
        except ValueError as error:
            return counts, str(error)
        counts.append(metrics["skipped_updates"])
        if number == 2:
            checkpoints.save(State(step=number))
    return counts, ""


@pytest.mark.parametrize("name", ["tensor", "data"])
def test_too_many_consecutive_skips_end_run_everywhere(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    variant, split = SPLITS[name]
    (counts, said), other = pool.run(2, stopped, checkpoints[variant], split, tmp_path)
    assert other == (counts, said)
    assert counts == [1.0, 1.0, 1.0, 1.0]  # those of the first two steps stand together, and no third
    assert "the actor's loss or gradient was not finite in 3 updates in a row" in said
    assert f"the last good checkpoint is {tmp_path / 'global_step_2'}" in said
    assert str(tmp_path / "nonfinite" / "step_5_actor_0.json") in said
    kept = {path.name for path in (tmp_path / "nonfinite").iterdir()}
    records = ["step_1_actor_1", "step_2_actor_0", "step_3_actor_1", "step_4_actor_0", "step_5_actor_0"]
    assert kept == {f"{record}.{ending}" for record in records for ending in ("json", "parquet")}

    facts = json.loads((tmp_path / "nonfinite" / "step_5_actor_0.json").read_text())
    assert (facts["model"], facts["step"], facts["minibatch"]) == ("actor", 5, 0)
    assert (facts["loss"], facts["grad_norm"]) == ("nan", "nan")
    assert facts["samples_of_micro_batches_whose_loss_is_not_finite"] == [[2]]
    named = facts["parameters_whose_gradient_is_not_finite"]
    assert any("decoder.layers.0" in parameter for parameter in named["rank 0"])

    [*_, poisoned, _] = pq.read_table(tmp_path / "nonfinite" / "step_5_actor_0.parquet").to_pylist()
    _, bad, _ = minibatches()
    assert poisoned["scores"] == POISON
    assert poisoned["prompt_ids"] == list(bad.prompt_of(2).token_ids)
    assert poisoned["responses"] == bad.response_ids(2).tolist()
    assert poisoned["advantages"] == bad.pieces(bad.advantages)[2].tolist()


def many(run_dir: Path) -> None:
    """On one rank: more mini-batches than are kept, the last with an extra term."""
    from megarl.learner.finite import NotFinite
    from megarl.learner.terms import LossTerm
    from megarl.tracking.config import TrainerSection
    from megarl.training.skips import MOST_KEPT, Skips

    trainer = TrainerSection(default_local_dir=str(run_dir), max_skipped_updates=MOST_KEPT + 1)
    skips = Skips("critic", trainer)
    term = LossTerm(batch=alone(experience()), objective=ACTOR)
    why = NotFinite(loss=float("inf"), grad_norm=1.0, rows=((), ()), parameters={})
    for number in range(MOST_KEPT + 1):
        skips.note(why, [term, term], step=3, minibatch=number)
    with pytest.raises(ValueError, match="has no intact checkpoint"):
        skips.note(why, [term], step=4, minibatch=0)


def test_so_many_are_kept(pool: RankPool, tmp_path: Path) -> None:
    from megarl.training.skips import MOST_KEPT

    pool.run(1, many, tmp_path)
    kept = {path.name for path in (tmp_path / "nonfinite").iterdir()}
    numbers = range(2, MOST_KEPT + 1)
    assert kept == {"step_4_critic_0.json", "step_4_critic_0.parquet"} | {
        f"step_3_critic_{number}{ending}" for number in numbers for ending in (".json", ".parquet", "_1.parquet")
    }


def last_words(run_dirs: list[Path]) -> str:
    """On one rank: how a run ends if it sees one checkpoint while another rank sees a second, just published."""
    import torch.distributed as dist

    from megarl.checkpoint.directory import name_latest
    from megarl.checkpoint.state import State
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.finite import NotFinite
    from megarl.learner.terms import LossTerm
    from megarl.tracking.config import TrainerSection
    from megarl.training.skips import Skips

    first, mine = run_dirs[0], run_dirs[dist.get_rank()]
    CheckpointStore(directory=first, learners={}, keep=None).save(State(step=2))
    if mine != first:
        for step in (2, 4):
            shutil.copytree(first / "global_step_2", mine / f"global_step_{step}")
        name_latest(mine, 4)
    skips = Skips("actor", TrainerSection(default_local_dir=str(mine), max_skipped_updates=0))
    why = NotFinite(loss=float("inf"), grad_norm=1.0, rows=((),), parameters={})
    with pytest.raises(ValueError, match="max_skipped_updates") as caught:
        skips.note(why, [LossTerm(batch=alone(experience()), objective=ACTOR)], step=5, minibatch=0)
    return str(caught.value)


def test_ranks_name_last_good_checkpoint_of_rank_0(pool: RankPool, tmp_path: Path) -> None:
    run_dirs = [tmp_path / "first", tmp_path / "second"]
    for run_dir, said in zip(run_dirs, pool.run(2, last_words, run_dirs), strict=True):
        assert f"the last good checkpoint is {run_dir / 'global_step_2'}" in said


def diverged(argv: list[str]) -> str:
    """On one rank: the last words of the training of a reward model whose loss overflows from its second step on."""
    from megarl.algorithms.losses import bradley_terry
    from megarl.training import objectives

    calls = count()

    def overflows(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        return bradley_terry(chosen, rejected, margins) + (math.inf if next(calls) else 0.0)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="max_skipped_updates") as caught:
        patch.setattr(objectives, "bradley_terry", overflows)
        train(argv)
    return str(caught.value)


def test_a_run_that_learns_from_files_stops_likewise(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    train_sentencepiece(checkpoints["qwen2"] / "tokenizer.model", vocab_size=200)
    rows = [{"prompt": f"{i} =", "chosen": f" {i} + 0", "rejected": f" {i} * 0"} for i in range(4)]
    write_rows(tmp_path / "pairs.parquet", rows)
    said = pool.run(
        2,
        diverged,
        [
            f"data.train_files={tmp_path / 'pairs.parquet'}",
            "data.train_batch_size=4",
            "data.max_length=32",
            f"model.path={checkpoints['qwen2']}",
            "megatron={dtype: float32}",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.total_training_steps=12",
            "trainer.save_freq=1",
            "trainer.max_skipped_updates=1",
            "trainer.n_gpus_per_node=2",
            "trainer.logger=[jsonl]",
        ],
    )
    assert said[0] == said[1]
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped_updates"] for line in lines] == [*[0.0] * (len(lines) - 1), 1.0]
    assert f"the last good checkpoint is {tmp_path / 'run' / f'global_step_{len(lines)}'}" in said[0]
    assert "reward_model/loss" in lines[0]
    assert "reward_model/loss" not in lines[-1]
    assert len(pq.read_table(next((tmp_path / "run" / "nonfinite").glob(f"step_{len(lines) + 1}_*.parquet")))) == 8
