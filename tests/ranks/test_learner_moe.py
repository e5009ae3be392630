"""Mixtures of experts and latent attention compute the same function as in `transformers`, under every split.

One rank is compared with `transformers` and plain autograd: log-probabilities, gradients and router losses. Every split
of the experts is compared with this rank.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.losses import Totals
from megarl.batch import Experience
from tests.support.learners import TOLERANCE, WARM_UP, learn_twice, learner_outputs, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import reference_outputs

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-unnormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe-one": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek_v2-yarn": ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-plain": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "n_group": 4, "topk_group": 2}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8}}),
    "deepseek_v3-sizes": ("deepseek_v3", {"v_head_dim": 48, "norm_topk_prob": False, "num_experts_per_tok": 3}),
}


def cut(*, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> dict[str, Any]:
    return {
        "context_parallel_size": cp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {  # world size, section
    "ep2": (2, cut(ep=2)),
    "tp2-etp2": (2, cut(tp=2)),
    "tp2-ep2-etp1": (2, cut(tp=2, ep=2, etp=1)),
    "tp2-etp1": (2, cut(tp=2, etp=1)),
    "pp2": (2, cut(pp=2)),
    "cp2-ep2": (2, cut(cp=2, ep=2)),
    "tp2-ep2-etp2": (4, cut(tp=2, ep=2, etp=2)),
    "tp2-pp2-ep2-etp1": (4, cut(tp=2, pp=2, ep=2, etp=1)),
}
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_one_rank_is_transformers(pool: RankPool, checkpoints: dict[str, Path], name: str) -> None:
    expected, norm, _ = reference_outputs(checkpoints[name])
    result = pool.run(1, learner_outputs, checkpoints[name], "policy", {}, 48)[0]
    torch.testing.assert_close(result["before"].log_probs, expected.log_probs.detach(), **TOLERANCE)
    torch.testing.assert_close(result["before"].entropy, expected.entropy.detach(), **TOLERANCE)
    assert result["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert not torch.equal(result["after"].log_probs, result["before"].log_probs)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "glm4_moe"])
def test_no_split_shows(pool: RankPool, checkpoints: dict[str, Path], name: str) -> None:
    expected = pool.run(1, learner_outputs, checkpoints[name], "policy", {}, 1000)[0]
    for split, (world_size, section) in SPLITS.items():
        for result in pool.run(world_size, learner_outputs, checkpoints[name], "policy", section, 48):
            torch.testing.assert_close(result["before"].log_probs, expected["before"].log_probs, **TOLERANCE)
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6), split
            after = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(result["after"].log_probs, expected["after"].log_probs, **after)


def silence(outputs: Any, micro: Experience, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective without a gradient."""
    loss = 0.0 * outputs.log_probs.sum()
    return loss, {"loss": loss.detach()}


def likelihood(outputs: Any, micro: Experience, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective with a gradient."""
    loss = -outputs.log_probs.sum()
    return loss, {"loss": loss.detach()}


def router_gradients(
    checkpoint: Path, split: dict[str, Any], coefficients: dict[str, float], max_tokens: int
) -> tuple[float, dict[str, Tensor]]:
    """Return the gradient norm of the router losses alone, and the gradients of this rank's routers."""
    from megarl.learner.batching import Budget

    split = split | {"override_transformer_config": coefficients}
    learner = make_test_learner(checkpoint, split, grad_clip=1e9)
    metrics = update(learner, [experience()], silence, Budget(max_tokens=max_tokens, max_sequences=None))
    parameters = learner.modules[0].named_parameters()
    return metrics["grad_norm"], {name: p.main_grad.clone() for name, p in parameters if "router" in name}


def update_of_weights(checkpoint: Path, split: dict[str, Any], frozen: bool) -> tuple[float, float, set[str]]:
    """Return the gradient norms of all weights and of this rank's routers, and the weights that an update changes."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, split, grad_clip=1e9, freeze_routers=frozen)
    weights = dict(learner.modules[0].named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    metrics = update(learner, [experience()], likelihood, Budget(max_tokens=1000, max_sequences=None))
    gradients = [weight.main_grad for name, weight in weights.items() if "router" in name and weight.requires_grad]
    changed = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    return metrics["grad_norm"], float(sum(gradient.square().sum() for gradient in gradients)) ** 0.5, changed


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_frozen_routers_keep_their_weights(pool: RankPool, checkpoints: dict[str, Path], name: str) -> None:
    norm, of_routers, changed = pool.run(1, update_of_weights, checkpoints[name], {}, False)[0]
    expected = {weight for weight in changed if "router" not in weight}
    assert expected < changed and of_routers > 0.0
    for world_size, split in ((1, {}), SPLITS["tp2-ep2-etp1"]):
        for found, _, learnt in pool.run(world_size, update_of_weights, checkpoints[name], split, True):
            assert found == pytest.approx((norm**2 - of_routers**2) ** 0.5, rel=1e-5)
            assert learnt and not any("router" in weight for weight in learnt)
            assert learnt == expected or world_size > 1


def expected_gradients(checkpoint: Path) -> list[Tensor]:
    """Return the gradients of both router losses with respect to the routers, by autograd through `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    seen: list[list[Tensor]] = [[] for _ in gates]
    for gate, logits in zip(gates, seen, strict=True):
        gate.register_forward_hook(lambda module, inputs, outputs, logits=logits: logits.append(outputs[0]))
    batch = experience()
    for sample in range(len(batch)):
        model(torch.tensor([[*batch.prompt_of(sample).token_ids, *batch.response_ids(sample).tolist()][:-1]]))
    total = torch.zeros(())
    for logits_of_gate in map(torch.cat, seen):
        num_experts = logits_of_gate.shape[1]
        probabilities = logits_of_gate.softmax(-1)
        chosen = torch.nn.functional.one_hot(probabilities.topk(2).indices, num_experts).float()
        fractions, means = chosen.mean((0, 1)), probabilities.mean(0)
        total = total + LOSSES["moe_aux_loss_coeff"] * num_experts * (fractions * means).sum()
        total = total + LOSSES["moe_z_loss_coeff"] * logits_of_gate.logsumexp(-1).square().mean()
    total.backward()
    return [gate.weight.grad for gate in gates]


def test_router_losses_are_what_their_coefficients_say(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    expected = expected_gradients(checkpoints["qwen3_moe"])
    norm, found = pool.run(1, router_gradients, checkpoints["qwen3_moe"], {}, LOSSES, 1000)[0]
    for gradient, reference in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-7)
    for world_size, split in ((2, cut(tp=2)), (2, cut(pp=2)), (2, cut(tp=2, ep=2, etp=1))):
        again = pool.run(world_size, router_gradients, checkpoints["qwen3_moe"], split, LOSSES, 1000)[0][0]
        assert again == pytest.approx(norm, rel=1e-5), split


def test_z_loss_is_independent_of_batch_split(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    only = {"moe_z_loss_coeff": 0.05}
    norm = pool.run(1, router_gradients, checkpoints["qwen3_moe"], {}, only, 1000)[0][0]
    assert norm > 0
    for world_size, split in ((1, {}), (2, cut(ep=2)), (2, cut(tp=2)), (4, cut(tp=2, ep=2, etp=1))):
        again = pool.run(world_size, router_gradients, checkpoints["qwen3_moe"], split, only, 24)[0][0]
        assert again == pytest.approx(norm, rel=1e-5), split
    assert pool.run(1, router_gradients, checkpoints["qwen3_moe"], {}, {}, 24)[0][0] == 0


def test_update_moves_router_bias_only_if_enabled(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    for rate, moved in ((None, False), (0.1, True)):
        override = {} if rate is None else {"moe_router_bias_update_rate": rate}
        before, after = pool.run(2, router_biases, checkpoints["deepseek_v3"], override)[0]
        assert before.any()
        assert torch.equal(before, after) != moved


def router_biases(checkpoint: Path, override: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the bias of the last layer's router before and after an update."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, cut(ep=2) | {"override_transformer_config": override})
    name = "decoder.layers.1.mlp.router.expert_bias"
    with learner.weights() as weights:
        before = weights[name].clone()
        update(learner, [experience()], likelihood, Budget(max_tokens=1000, max_sequences=None))
        return before, weights[name].clone()


@pytest.mark.parametrize(("name", "frozen"), [("deepseek_v3", False), ("gpt_oss", False), ("gpt_oss", True)])
@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_moe_learner_resumes_exactly_under_any_split(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, distributed_optimizer: bool, name: str, frozen: bool
) -> None:
    def learn(split: dict[str, Any], save: Path | None, load: Path | None) -> Any:
        options = (distributed_optimizer, WARM_UP, None, frozen)
        return pool.run(2, learn_twice, checkpoints[name], "policy", split, save, load, *options)[0]

    expected, outputs = learn(cut(ep=2), tmp_path, None)
    again, outputs_again = learn(cut(ep=2), None, tmp_path)
    assert again == expected
    assert torch.equal(outputs_again, outputs)
    for other in (cut(tp=2, etp=1 if name == "gpt_oss" else 2), cut(pp=2), cut(tp=2, ep=2, etp=1)):
        metrics, elsewhere = learn(other, None, tmp_path)
        assert metrics == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(elsewhere, outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type=sinkhorn"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0"),
        ({"sequence_parallel": False}, "needs sequence_parallel=true"),
    ],
)
def test_refuses_by_name(pool: RankPool, checkpoints: dict[str, Path], override: dict[str, Any], message: str) -> None:
    section = cut(tp=2) | {"override_transformer_config": override}
    with pytest.raises(AssertionError, match=message):
        pool.run(2, learner_outputs, checkpoints["qwen3_moe"], "policy", section, 24)
