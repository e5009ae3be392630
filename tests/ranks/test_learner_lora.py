"""Adapters: under every split, outputs and gradients equal those of `transformers` on the merged weights."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.learner.config import OptimSection
from megarl.models.architecture import read_architecture
from megarl.models.lora import Lora, require_targets
from megarl.platform.errors import UserError
from tests.support.adapters import Answer, answer, answer_with_dropout, at, drawn, fill, learn_together
from tests.support.learners import (
    ACTOR,
    TEMPERATURE,
    TOLERANCE,
    learn_twice,
    make_test_learner,
    outputs_of_all,
)
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.shards import names_of

LORA = Lora(rank=4, alpha=6.0)
LORAS = {"qwen3_next": Lora(rank=4, alpha=6.0, targets=("q_proj", "v_proj", "up_proj"))}  # all-linear is refused
OPTIM = OptimSection(lr=1e-2, lr_warmup_steps=4)
SPARSE = ("qwen3_moe", "deepseek_v3", "qwen3_next")
CHECKPOINTS = {
    **{variant: (variant, {}) for variant in ("llama", "qwen3-tied", "phi3", "gpt_neox", "gpt_oss", *SPARSE)},
    "llama-deep": ("llama", {"num_hidden_layers": 4}),
}


def split(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    """Return the fields of a MegatronSection."""
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}


SPLITS_OF_DENSE = [
    (1, split()),
    (2, split(2)),
    (2, split(2, sequence_parallel=False)),
    (2, split(1, 2)),
    (2, split()),
    (2, split(context_parallel_size=2)),
    (4, split(2, 2)),
    (4, split(2)),
    (4, split(4)),
]
SPLITS_OF_SPARSE = [
    (1, split()),
    (2, split(2)),
    (2, split(2, expert_tensor_parallel_size=1)),
    (2, split(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)),
    (2, split(expert_model_parallel_size=2)),
    (4, split(2, 2)),
    (4, split(2, expert_model_parallel_size=2)),
]
SPLITS_OF_BIASED = [(1, split()), *SPLITS_OF_SPARSE[2:5]]
SPLITS_OF_DEEP = [(2, split(1, 2, virtual_pipeline_model_parallel_size=2))]
SPLITS = {"gpt_oss": SPLITS_OF_BIASED, "llama-deep": SPLITS_OF_DEEP, **dict.fromkeys(SPARSE, SPLITS_OF_SPARSE)}


def learn(checkpoint: Path, lora: Lora, fields: dict[str, Any], recompute: Any) -> Any:
    """On each rank: compute outputs and a gradient; return them, and those without adapters."""
    from megarl.learner.batching import Budget
    from megarl.learner.lora import adapter_layout
    from megarl.learner.terms import LossTerm

    learner = make_test_learner(checkpoint, fields, temperature=TEMPERATURE, lora=lora, recompute=recompute)
    fill(learner, drawn(checkpoint, lora))
    batch, budget = experience(), Budget(max_tokens=40, max_sequences=None)
    outputs = outputs_of_all(learner, batch, budget).log_probs
    start = outputs_of_all(learner.without_adapters(), batch, budget).log_probs
    learner.optimizer.zero_grad()
    gradient = learner.forward_backward([LossTerm(batch=learner.spread(batch), objective=ACTOR)], budget)
    main = {
        f"{number}.{name}": parameter.main_grad
        for number, chunk in enumerate(learner.modules)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
    pieces = [
        (piece.name, piece.box, piece.view(main[piece.param]).clone()) for piece in adapter_layout(learner.modules)
    ]
    return outputs, start, gradient.loss, gradient.norm, pieces


@pytest.fixture(scope="module")
def answers(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The answer of each checkpoint."""
    root = tmp_path_factory.mktemp("answers")
    return {variant: answer(path, root / variant, LORAS.get(variant, LORA)) for variant, path in checkpoints.items()}


@pytest.mark.parametrize("variant", CHECKPOINTS)
def test_every_split_learns_alike(
    pool: RankPool, checkpoints: dict[str, Path], answers: dict[str, Answer], variant: str
) -> None:
    expected = answers[variant]
    for world_size, fields in SPLITS.get(variant, SPLITS_OF_DENSE):
        whole = fields | {"use_distributed_optimizer": False}
        for found in pool.run(
            world_size, learn, checkpoints[variant], LORAS.get(variant, LORA), whole, world_size == 2
        ):
            require_answer(found, expected.outputs.log_probs.detach(), expected)
            assert not torch.allclose(found[1], found[0], atol=0.1)


def require_answer(found: Any, outputs: Tensor, expected: Answer) -> None:
    """Check what `learn` returned: undropped `outputs`, and the loss and gradients of an update."""
    own, _, loss, norm, pieces = found
    torch.testing.assert_close(own, outputs, **TOLERANCE)
    assert loss == pytest.approx(expected.loss, rel=1e-5)
    assert norm == pytest.approx(expected.norm, rel=1e-5)
    for name, box, gradient in pieces:
        torch.testing.assert_close(gradient, at(expected.gradients[name], box), rtol=1e-4, atol=5e-6, msg=name)


@pytest.mark.parametrize("variant", ["llama", "llama-deep"])
def test_every_split_drops_alike(
    pool: RankPool, checkpoints: dict[str, Path], answers: dict[str, Answer], variant: str
) -> None:
    lora = replace(LORA, dropout=0.3)
    expected = answer_with_dropout(checkpoints[variant], lora)
    outputs = answers[variant].outputs.log_probs.detach()
    assert expected.loss != pytest.approx(answers[variant].loss, rel=1e-3)
    splits = SPLITS.get(variant, SPLITS_OF_DENSE)
    for recompute, (world_size, fields) in zip(cycle([True, False, "selective"]), splits, strict=False):
        whole = fields | {"use_distributed_optimizer": False}
        for found in pool.run(world_size, learn, checkpoints[variant], lora, whole, recompute):
            require_answer(found, outputs, expected)


def test_latent_attention_drops_alike(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    lora = replace(LORA, dropout=0.3, excluded=r".*\.mlp\.experts\..*")
    args = checkpoints["deepseek_v3"], lora
    (alone,) = pool.run(1, learn, *args, {"use_distributed_optimizer": False}, False)
    outputs, _, loss, norm, pieces = alone
    gradients = {name: gradient for name, _, gradient in pieces}
    expected = Answer(outputs=outputs, loss=loss, norm=norm, gradients=gradients)
    for world_size, fields in SPLITS_OF_SPARSE[1:]:
        whole = fields | {"use_distributed_optimizer": False}
        for found in pool.run(world_size, learn, *args, whole, world_size == 2):
            require_answer(found, outputs, expected)


def test_adapters_of_experts_have_no_dropout(checkpoints: dict[str, Path]) -> None:
    architecture = read_architecture(json.loads((checkpoints["qwen3_moe"] / "config.json").read_text()))
    with pytest.raises(UserError, match="lora_dropout: 0.1 has no effect on adapters of experts"):
        require_targets(architecture, replace(LORA, dropout=0.1))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stage_may_have_no_adapters(pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, layer: int) -> None:
    lora = replace(LORA, dropout=0.1, targets=rf"model\.layers\.{layer}\..*")
    args = (checkpoints["llama"], "policy")
    ((expected, outputs),) = pool.run(1, learn_twice, *args, split(), None, None, True, OPTIM, lora)
    for save, load in ((tmp_path, None), (None, tmp_path)):
        for metrics, found in pool.run(2, learn_twice, *args, split(1, 2), save, load, True, OPTIM, lora):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
            torch.testing.assert_close(found, outputs, rtol=1e-4, atol=1e-4)


def test_a_critic_shares_the_frozen_weights(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    for world_size, fields in [(1, split()), (4, split(2, 2))]:
        alone, shared = (
            pool.run(world_size, learn_together, checkpoints["llama"], LORA, fields, is_shared)
            for is_shared in (False, True)
        )
        for (expected, num_bytes), (found, fewer_bytes) in zip(alone, shared, strict=True):
            assert all(map(torch.equal, expected, found))
            assert fewer_bytes < 0.7 * num_bytes


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_resumes_exactly_from_adapters_alone(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, role: str, variant: str
) -> None:
    args = (checkpoints[variant], role)
    lora = replace(LORA, dropout=0.0 if variant in SPARSE else 0.1)
    for fields in (split(2), split(1, 2), split(expert_model_parallel_size=2) if variant in SPARSE else split()):
        saved = tmp_path / str(fields)
        saved.mkdir()
        expected = pool.run(2, learn_twice, *args, fields, saved, None, True, OPTIM, lora)
        resumed = pool.run(2, learn_twice, *args, fields, None, saved, True, OPTIM, lora)
        for (metrics, outputs), (again, same) in zip(expected, resumed, strict=True):
            assert metrics == again
            assert torch.equal(outputs, same)
        for other in (split(2), split(1, 2), split(2, 2)):
            world_size = 4 if other == split(2, 2) else 2
            for metrics, outputs in pool.run(world_size, learn_twice, *args, other, None, saved, True, OPTIM, lora):
                assert metrics == pytest.approx(expected[0][0], rel=1e-4, abs=1e-5)
                torch.testing.assert_close(outputs, expected[0][1], rtol=1e-4, atol=1e-4)
        assert not any(name.endswith("linear_qkv.weight") for name in names_of(saved)), "the base is not saved"
