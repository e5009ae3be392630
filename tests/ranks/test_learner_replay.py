"""Routers that take given experts compute what `transformers` computes with these experts, under every split."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.losses import Totals
from megarl.batch import Experience
from megarl.models.lora import Lora
from tests.support.learners import ACTOR, TOLERANCE, make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import gradient_norm, outputs_of
from tests.support.replays import TOP_K, recorded, replay, routed

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "four layers": ("qwen3_moe", {"num_hidden_layers": 4}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8}),
}
NOISE = 0.2
NUM_ROUTERS = {"qwen3_moe": 2, "deepseek_v3": 1, "gpt_oss": 2}


def split(*, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        **fields,
    }


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {  # world size, section
    "dp2": (2, split()),
    "ep2": (2, split(ep=2)),
    "tp2": (2, split(tp=2)),
    "pp2": (2, split(pp=2)),
    "cp2": (2, split(cp=2)),
    "tp2-pp2-ep2": (4, split(tp=2, pp=2, ep=2)),
}
RECOMPUTATIONS = (False, True, "selective")


def gates_of(model: Any) -> list[Any]:
    return [getattr(layer.mlp, "gate", None) or layer.mlp.router for layer in model.model.layers]


def with_routes(model: Any, batch: Experience) -> None:
    """Let the gates of a qwen3_moe or gpt_oss of `transformers` take the routes of a batch, sequence by sequence."""
    assert batch.routes is not None
    of_samples = batch.routes.long().split(batch.num_places().tolist())

    def taking(router: int) -> Callable[..., Any]:
        remaining = iter(of_samples)

        def take(gate: Any, inputs: Any, outputs: Any) -> Any:
            logits = outputs[0]
            routes = next(remaining)[:, router]
            routes = torch.cat([routes, torch.arange(TOP_K)[None]])  # the last token predicts nothing
            weights = logits.softmax(-1).gather(-1, routes)
            return logits, weights / weights.sum(-1, keepdim=True), routes

        return take

    for number, gate in enumerate(gates_of(model)):
        gate.register_forward_hook(taking(number))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_one_rank_is_transformers_with_these_experts(pool: RankPool, checkpoints: dict[str, Path], name: str) -> None:
    batch = routed(2)
    model, other = (AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32) for _ in range(2))
    with_routes(model, batch)
    expected = outputs_of(model, batch, {None: other})
    loss, _ = ACTOR(expected, batch, Totals.of(batch.num_learnt()))
    loss.backward()
    result = pool.run(1, replay, checkpoints[name], {}, batch, 48)[0]
    torch.testing.assert_close(result["before"].log_probs, expected.log_probs.detach(), **TOLERANCE)
    assert result["metrics"]["grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-5)


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("name", NUM_ROUTERS)
def test_no_split_shows(pool: RankPool, checkpoints: dict[str, Path], name: str, with_scores: bool) -> None:
    batch = routed(NUM_ROUTERS[name], with_scores=with_scores)
    expected = pool.run(1, replay, checkpoints[name], {}, batch, 1000)[0]
    assert 0.1 < expected["metrics"]["router_agreement"] < 0.5
    for which, (world_size, section) in SPLITS.items():
        for result in pool.run(world_size, replay, checkpoints[name], section, batch, 48):
            torch.testing.assert_close(result["before"].log_probs, expected["before"].log_probs, **TOLERANCE)
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6), which
            torch.testing.assert_close(result["after"].log_probs, expected["after"].log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("section", [{}, split(pp=2)], ids=["one", "pp2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_recomputation_replays_too(
    pool: RankPool, checkpoints: dict[str, Path], name: str, section: dict[str, Any]
) -> None:
    """Several micro-batches are in flight before the first is computed again."""
    batch = routed(2, with_scores=True)
    found = [
        pool.run(1 + bool(section), replay, checkpoints[name], section, batch, 24, recompute)[-1]
        for recompute in RECOMPUTATIONS
    ]
    for result in found[1:]:
        assert result["metrics"] == pytest.approx(found[0]["metrics"], rel=1e-6)
        assert torch.equal(result["before"].log_probs, found[0]["before"].log_probs)


@pytest.mark.parametrize("recompute", RECOMPUTATIONS)
def test_virtual_pipeline_replays_too(pool: RankPool, checkpoints: dict[str, Path], recompute: Any) -> None:
    batch = routed(4, with_scores=True)
    section = split(pp=2, virtual_pipeline_model_parallel_size=2)
    expected = pool.run(1, replay, checkpoints["four layers"], {}, batch, 48)[0]
    for result in pool.run(2, replay, checkpoints["four layers"], section, batch, 48, recompute):
        torch.testing.assert_close(result["before"].log_probs, expected["before"].log_probs, **TOLERANCE)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)


def with_own_routes(checkpoint: Path, *, with_scores: bool = False) -> Experience:
    """Return the experience of the other tests, with the experts that a qwen3_moe of `transformers` chooses."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen: list[list[Tensor]] = [[], []]
    for gate, of_gate in zip(gates_of(model), chosen, strict=True):

        def note(module: Any, inputs: Any, outputs: Any, of_gate: list[Tensor] = of_gate) -> None:
            logits, _, experts = outputs
            scores = logits.softmax(-1).gather(-1, experts)
            of_gate.append(torch.cat([experts, scores], dim=-1) if with_scores else experts.to(torch.uint8))

        gate.register_forward_hook(note)
    batch = experience()
    with torch.no_grad():
        for sample in range(len(batch)):
            model(torch.tensor([[*batch.prompt_of(sample).token_ids, *batch.response_ids(sample).tolist()][:-1]]))
    return replace(batch, routes=torch.stack([torch.cat(of_gate) for of_gate in chosen], dim=1))


@pytest.mark.parametrize("with_scores", [False, True])
def test_own_choice_changes_nothing(pool: RankPool, checkpoints: dict[str, Path], with_scores: bool) -> None:
    batch, own = experience(), with_own_routes(checkpoints["qwen3_moe"], with_scores=with_scores)
    without = pool.run(1, replay, checkpoints["qwen3_moe"], {}, batch, 48)[0]
    result = pool.run(1, replay, checkpoints["qwen3_moe"], {}, own, 48)[0]
    torch.testing.assert_close(result["before"].log_probs, without["before"].log_probs, **TOLERANCE)
    assert result["metrics"].pop("router_agreement") == 1.0
    assert result["metrics"] == pytest.approx(without["metrics"], rel=1e-5)


def router_bias_after(checkpoint: Path, section: dict[str, Any], batch: Experience) -> list[float]:
    """Return how an update with replay moves the bias of the last router."""
    from megarl.learner.batching import Budget

    override = {"override_transformer_config": {"moe_router_bias_update_rate": 0.1}}
    learner = make_test_learner(checkpoint, section | override, replays="experts")
    router = learner.modules[-1].decoder.layers[-1].mlp.router
    before = router.expert_bias.clone()
    update(learner, [batch], ACTOR, Budget(max_tokens=48, max_sequences=None))
    return [round(move, 6) for move in (router.expert_bias - before).tolist()]


def test_balancing_counts_the_replayed_experts(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    """The bias of an expert falls if it got more tokens than the mean, and rises if it got fewer."""
    batch = experience()
    routes = torch.tensor([0, 5], dtype=torch.uint8).expand(int(batch.num_places().sum()), 1, TOP_K)
    expected = [-0.1, 0.1, 0.1, 0.1, 0.1, -0.1, 0.1, 0.1]
    for world_size, section in ((1, {}), (2, split(ep=2)), (2, split(tp=2))):
        moves = pool.run(
            world_size, router_bias_after, checkpoints["deepseek_v3"], section, replace(batch, routes=routes)
        )
        assert moves[0] == expected


def disturbed_log_probs(checkpoint: Path, batch: Experience, noise: float) -> tuple[Tensor, float]:
    """Return log-probabilities of a model whose router logits have noise, and how often its routers agree."""
    from megarl.learner.batching import Budget
    from megarl.learner.experts import routers_of

    learner = make_test_learner(checkpoint, {}, replays="scores")
    budget = Budget(max_tokens=1000, max_sequences=None)
    for number, router in enumerate(routers_of(learner.modules[:1])):
        generator = torch.Generator().manual_seed(number)
        choose = router.routing

        def disturbed(logits: Tensor, padding_mask: Any, choose: Any = choose, generator: Any = generator) -> Any:
            return choose(logits + noise * torch.randn(logits.shape, generator=generator), padding_mask)

        router.routing = disturbed
    log_probs = outputs_of_all(learner, batch, budget).log_probs
    agreement = update(learner, [batch], ACTOR, budget).get("router_agreement", 1.0)
    return log_probs, agreement


def test_replay_removes_most_of_planted_disagreement(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    """At least a tenth of the choices fall to other experts."""
    own = with_own_routes(checkpoints["qwen3_moe"])
    engine, _ = pool.run(1, disturbed_log_probs, checkpoints["qwen3_moe"], own, 0.0)[0]
    trainer, agreement = pool.run(1, disturbed_log_probs, checkpoints["qwen3_moe"], own, NOISE)[0]
    without, _ = pool.run(1, disturbed_log_probs, checkpoints["qwen3_moe"], replace(own, routes=None), NOISE)[0]
    kl, kl_without = (float(((each - engine).exp() - 1 - (each - engine)).mean()) for each in (trainer, without))
    assert agreement < 0.9
    assert kl < kl_without / 7


def test_scores_remove_all_of_planted_disagreement(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    own = with_own_routes(checkpoints["qwen3_moe"], with_scores=True)
    engine, _ = pool.run(1, disturbed_log_probs, checkpoints["qwen3_moe"], own, 0.0)[0]
    trainer, agreement = pool.run(1, disturbed_log_probs, checkpoints["qwen3_moe"], own, NOISE)[0]
    assert agreement < 0.9
    torch.testing.assert_close(trainer, engine, **TOLERANCE)


def test_a_reference_leaves_the_scores(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    """Its scores are not those of the policy in the engine."""
    found = [
        pool.run(1, replay, checkpoints["qwen3_moe"], {}, batch, 48, False, "experts")[0]["before"].log_probs
        for batch in (routed(2), routed(2, with_scores=True))
    ]
    assert torch.equal(*found)


def frozen_log_probs(checkpoint: Path, batch: Experience) -> dict[str, tuple[Tensor, Tensor]]:
    """Return log-probabilities by what is replayed: of a model, and of a learner without its adapters."""
    from megarl.learner.batching import Budget

    budget = Budget(max_tokens=48, max_sequences=None)
    learner = make_test_learner(checkpoint, {}, lora=Lora(rank=4, alpha=6.0), replays="scores")
    return {
        replays: (
            outputs_of_all(make_test_learner(checkpoint, {}, replays=replays), batch, budget).log_probs,
            outputs_of_all(learner.without_adapters(replays=replays), batch, budget).log_probs,
        )
        for replays in ("none", "experts")
    }


def test_a_start_replays_what_it_is_told(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    found = pool.run(1, frozen_log_probs, checkpoints["qwen3_moe"], routed(2, with_scores=True))[0]
    for expected, own in found.values():
        assert torch.equal(own, expected)
    assert not torch.allclose(found["none"][1], found["experts"][1], atol=1e-3)


@pytest.mark.parametrize("which", [None, *SPLITS])
def test_a_pass_returns_its_own_choice(pool: RankPool, checkpoints: dict[str, Path], which: str | None) -> None:
    own = with_own_routes(checkpoints["qwen3_moe"])
    world_size, section = SPLITS[which] if which else (1, {})
    for samples, routes, layers, _ in pool.run(world_size, recorded, checkpoints["qwen3_moe"], section, 48):
        assert routes.dtype == torch.uint8
        expected = own.select(samples).routes
        assert expected is not None
        assert torch.equal(routes.sort(-1).values, expected[:, layers].sort(-1).values)
