"""Test the phases that do not fit, and the advice to make them fit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.planning.advice import PARTIAL, WORTHWHILE, Remedy
from megarl.planning.device import H100
from megarl.planning.machine import Lengths
from megarl.planning.planner import Plan, Planner, Saving
from megarl.planning.traffic import Links

MODELS = Path(__file__).parents[2] / "configs" / "models"
MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
GB = 10**9


def plan(*argv: str, gigabytes: int = 80, lengths: Lengths | None = None, host_bytes: int | None = None) -> Plan:
    return planner(*argv, gigabytes=gigabytes, lengths=lengths, host_bytes=host_bytes).plan()


def planner(*argv: str, gigabytes: int, lengths: Lengths | None = None, host_bytes: int | None = None) -> Planner:
    """GRPO without a reference: Llama-3-8B on eight ranks, tensor 4 x data 2, engines of 4."""
    arguments = [
        "data.train_files=train.parquet",
        f"actor_rollout_ref.model.path={MODELS / 'llama-3-8b'}",
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        f"{ROLLOUT}.n=8",
        f"{MEGATRON}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        *argv,
    ]
    links = Links(inside=400e9, between=45e9)
    device = replace(H100, num_bytes=gigabytes * GB)
    return Planner(arguments, device=device, ranks_per_node=None, links=links, lengths=lengths, host_bytes=host_bytes)


def changes(remedies: Sequence[Remedy | Saving]) -> list[tuple[str, ...]]:
    return [remedy.overrides for remedy in remedies]


def test_what_fits_needs_no_remedy() -> None:
    found = plan("actor_rollout_ref.model.enable_gradient_checkpointing=true")
    assert not found.shortfalls and not found.remedies
    assert found.memory.peak <= 80 * GB


def test_trainer_leaving_no_memory_for_engine_gets_remedy() -> None:
    """At rest 4 + 8 + 12 GB of the actor and 0.9 x 80 of the engine: more than 80 by what is left of them."""
    found = plan(f"{ROLLOUT}.gpu_memory_utilization=0.9", "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    states = found.memory.states["actor"]
    (shortfall,) = found.shortfalls
    assert shortfall.phase == "generate"
    assert shortfall.num_bytes == states.weights + states.gradients + states.optimizer + 72 * GB - 80 * GB
    # 16 GB are missing, so no single part of the actor is enough; a smaller engine is.
    assert changes(found.remedies) == [(f"{ROLLOUT}.gpu_memory_utilization=0.65",)]
    assert all(remedy.missing == 0 for remedy in found.remedies)


def test_offloading_is_named_first_where_it_is_enough() -> None:
    found = plan(f"{ROLLOUT}.gpu_memory_utilization=0.75", "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    flags = [f"{MEGATRON}.{part}_offload=true" for part in ("optimizer", "grad")]  # 12 or 8 GB; the weights are but 4.0
    assert [(flag,) for flag in flags] == changes(found.remedies)[:2]
    assert (f"{MEGATRON}.param_offload=true",) not in changes(found.remedies)


def test_an_engine_too_small_for_one_sequence() -> None:
    found = plan(f"{ROLLOUT}.gpu_memory_utilization=0.05", "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    (shortfall,) = found.shortfalls
    assert shortfall.phase == "generate"
    assert "one sequence of 1024 tokens" in shortfall.reason
    assert changes(found.remedies)[0] == (f"{ROLLOUT}.gpu_memory_utilization=0.1",)


@pytest.mark.parametrize(("num_tokens", "amount"), [(32768, "selective"), (65536, "true")])
def test_as_little_is_computed_again_as_is_enough(num_tokens: int, amount: str) -> None:
    found = plan(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={num_tokens}", gigabytes=50)
    assert (f"actor_rollout_ref.model.enable_gradient_checkpointing={amount}",) in changes(found.remedies)


RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing"


def size(key: str) -> str:
    return f"{MEGATRON}.{key}_model_parallel_size"


def fastest(*argv: str, gigabytes: int) -> float:
    """Return the least time of a step of all splits and amounts of recomputation that leave a twentieth free."""
    tried = [
        planner(
            *argv, f"{size('tensor')}={tp}", f"{size('pipeline')}={pp}", f"{RECOMPUTE}={amount}", gigabytes=gigabytes
        )
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        if tp * pp <= 8
        for amount in ("false", "selective", "true")
    ]
    tried.sort(key=lambda one: one.least_time().total)
    return next(one.least_time().total for one in tried if one.plan().memory.peak <= 0.95 * gigabytes * GB)


@pytest.mark.parametrize(("num_tokens", "gigabytes"), [(32768, 50), (65536, 80)])
def test_the_fastest_trainer_that_fits_is_proposed(num_tokens: int, gigabytes: int) -> None:
    configured = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={num_tokens}", f"{RECOMPUTE}=true"
    found = plan(*configured, gigabytes=gigabytes)
    assert not found.shortfalls
    (saving,) = found.savings
    changed = plan(*configured, *saving.overrides, gigabytes=gigabytes)
    assert not changed.shortfalls
    assert (saving.seconds, saving.peak) == (changed.time.total, changed.memory.peak)
    least = fastest(*configured, gigabytes=gigabytes)
    assert least <= saving.seconds < found.time.total
    assert WORTHWHILE * saving.seconds < least
    assert not changed.savings, "the proposal is the fastest itself"


@pytest.mark.parametrize(
    ("configured", "num_tokens", "proposed"),
    [
        ("true", 32768, "false"),
        ("true", 65536, "selective"),
        ("selective", 32768, "false"),
        ("selective", 65536, None),
        ("false", 32768, None),
    ],
)
def test_one_rank_computes_as_little_again_as_fits(configured: str, num_tokens: int, proposed: str | None) -> None:
    arguments = [
        "data.train_files=train.parquet",
        f"actor_rollout_ref.model.path={MODELS / 'qwen2.5-7b'}",
        "actor_rollout_ref.model.override_config.num_hidden_layers=4",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={num_tokens}",
        "algorithm.adv_estimator=grpo",
        f"{RECOMPUTE}={configured}",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
    ]
    links = Links(inside=400e9, between=45e9)
    found = Planner(arguments, device=replace(H100, num_bytes=60 * GB), ranks_per_node=None, links=links).plan()
    assert not found.shortfalls
    assert changes(found.savings) == ([(f"{RECOMPUTE}={proposed}",)] if proposed else [])


def test_what_does_not_fit_saves_nothing() -> None:
    found = plan(f"{RECOMPUTE}=true", gigabytes=24)
    assert found.shortfalls and not found.savings


def test_run_beyond_host_memory_saves_nothing() -> None:
    configured = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768", f"{RECOMPUTE}=true"
    needed = plan(*configured, gigabytes=50).host.total
    assert plan(*configured, gigabytes=50, host_bytes=2 * needed).savings
    found = plan(*configured, gigabytes=50, host_bytes=needed - 1)
    assert found.host_missing and not found.shortfalls and not found.savings


def test_savings_fit_into_host_memory() -> None:
    """Responses that continue take memory of the host."""
    tail = Lengths(256, 1000, 8000)
    needed = plan(lengths=tail).host.total
    assert PARTIAL in changes(plan(lengths=tail, host_bytes=2 * needed).savings)
    assert PARTIAL not in changes(plan(lengths=tail, host_bytes=needed).savings)


def test_a_long_tail_calls_for_partial_rollouts() -> None:
    tail = Lengths(256, 1000, 8000)
    assert [saving.overrides for saving in plan(lengths=tail).savings][-1:] == [PARTIAL]
    for other in (plan(lengths=Lengths(256, 1000)), plan(*PARTIAL, lengths=tail)):
        assert PARTIAL not in [saving.overrides for saving in other.savings]


def test_what_no_single_change_mends_is_mended_together() -> None:
    found = plan("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536", gigabytes=24)
    (remedy,) = found.remedies
    assert len(remedy.overrides) > 1
    assert "actor_rollout_ref.model.enable_gradient_checkpointing=true" in remedy.overrides
    repaired = plan("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536", *remedy.overrides, gigabytes=24)
    assert sum(shortfall.num_bytes for shortfall in repaired.shortfalls) == remedy.missing
    assert len(remedy.overrides) == len({override.partition("=")[0] for override in remedy.overrides})


def test_engines_that_are_possible_are_compared() -> None:
    found = plan("trainer.nnodes=2", f"{MEGATRON}.pipeline_model_parallel_size=2")
    tried = {option.change.rpartition("=")[2]: option for option in found.options}
    assert set(tried) == {"1", "2", "8", "rank order tp-cp-ep-pp-dp"}
    assert tried["8"].traffic is not None
    assert tried["8"].traffic.received_max == pytest.approx(2.0 * GB, rel=0.02)
    assert [option.configurable for option in found.options] == [True, True, True, False]
