"""The plan's weights, gradients and optimizer state are the bytes of the tensors that a real learner allocates."""

from pathlib import Path
from typing import Any

import pytest

from megarl.learner.config import MegatronSection, OptimSection
from megarl.learner.grid import grid_of
from megarl.models.architecture import Architecture, read_architecture
from megarl.models.lora import Lora
from megarl.models.trainer import parameter_shapes
from megarl.planning.activations import PhaseWork
from megarl.planning.states import States, adapted_states, copied_bytes, frozen_states, trained_states
from megarl.planning.workload import TrainerModel
from tests.support.learners import states_of
from tests.support.ranks import RankPool, fresh_mesh
from tests.support.tiny import SIZES, VARIANTS

SPLITS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
    "data, every rank its own optimizer": {"use_distributed_optimizer": False},
    "virtual pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "latents": {"tensor_model_parallel_size": 2},
    "memories": {"tensor_model_parallel_size": 2},
    "experts": {"expert_model_parallel_size": 2},
    "experts of two ranks": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}


OTHERS = {"experts": "qwen3_moe", "latents": "deepseek_v3", "memories": "qwen3_next"}


def architecture(variant: str) -> Architecture:
    """Large enough that padding hardly counts."""
    return read_architecture(SIZES | VARIANTS[variant] | {"num_hidden_layers": 4, "vocab_size": 500})


def make(variant: str, split: dict[str, Any], role: Any, trained: bool, lora: Lora | None = None) -> Any:
    from megarl.learner.factory import make_learner

    section = MegatronSection(**split)
    return make_learner(
        None,
        architecture(variant),
        section,
        fresh_mesh(section),
        role=role,
        training=(OptimSection(), 1.0, 1) if trained else None,
        lora=lora,
    )


def allocated(variant: str, split: dict[str, Any], role: str, trained: bool, lora: Lora | None = None) -> States:
    """On one rank: the bytes of all storages that a learner holds on to."""
    return states_of(make(variant, split, role, trained, lora))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SPLITS)
def test_trained_models(pool: RankPool, name: str, dtype: str) -> None:
    variant = OTHERS.get(name.split()[0], "qwen2")
    split = SPLITS[name] | {"dtype": dtype}
    section, model = MegatronSection(**split), architecture(variant)
    grid = grid_of(section, 2)
    found = pool.run(2, allocated, variant, split, "policy", True)
    planned = [trained_states(parameter_shapes(model, grid, rank), section, grid) for rank in range(2)]
    for real, plan in zip(found, planned, strict=True):
        assert real.weights == pytest.approx(plan.weights, rel=0.01)
        assert real.gradients == pytest.approx(plan.gradients, rel=0.01)
    # The last data-parallel rank has the padding in its shard, so only the fullest is what the plan says.
    fullest = max(found, key=lambda states: states.optimizer)
    assert fullest.optimizer == pytest.approx(max(plan.optimizer for plan in planned), rel=0.01)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "data", "data, every rank its own optimizer", "experts"])
def test_adapted_models(pool: RankPool, name: str) -> None:
    variant = "qwen3_moe" if name == "experts" else "qwen2"
    section, lora = MegatronSection(**SPLITS[name]), Lora(rank=16, alpha=16.0)
    grid = grid_of(section, 2)
    found = pool.run(2, allocated, variant, SPLITS[name], "policy", True, lora)
    work = PhaseWork(num_tokens=1, num_micro_batches=1, role="policy", recompute=False)
    model = TrainerModel(
        name="actor", architecture=architecture(variant), section=section, infers=work, updates=work, lora=lora
    )
    planned = [
        adapted_states(model.frozen_shapes(grid, rank), model.learning_shapes(grid, rank), section, grid)
        for rank in range(2)
    ]
    for real, plan in zip(found, planned, strict=True):
        assert plan.gradients < plan.frozen
        assert real.weights == pytest.approx(plan.weights, rel=0.01)
        assert real.gradients == pytest.approx(plan.gradients, rel=0.02)
    fullest = max(found, key=lambda states: states.optimizer)
    assert fullest.optimizer == pytest.approx(max(plan.optimizer for plan in planned), rel=0.02)


def copied(variant: str, split: dict[str, Any], directory: Path) -> int:
    """On one rank: the bytes that a save keeps in host memory."""
    from megarl.learner.checkpoint import save_learner
    from megarl.learner.staging import Staging

    staging = Staging()
    writing = save_learner(make(variant, split, "policy", True), directory, staging)
    writing.write()
    writing.finish()
    return staging.num_bytes


@pytest.mark.parametrize("name", ["tensor", "data", "data, every rank its own optimizer", "experts"])
def test_copies_of_saves(pool: RankPool, tmp_path: Path, name: str) -> None:
    variant, split = "qwen3_moe" if name == "experts" else "qwen2", SPLITS[name]
    section = MegatronSection(**split)
    grid = grid_of(section, 2)
    found = pool.run(2, copied, variant, split, tmp_path)
    planned = max(copied_bytes(parameter_shapes(architecture(variant), grid, rank), section, grid) for rank in range(2))
    assert 0.8 * planned < max(found) <= 1.05 * planned
    assert min(found) > 0.8 * max(found)


def test_frozen_and_value_models(pool: RankPool) -> None:
    split = SPLITS["pipeline"]
    section, model = MegatronSection(**split), architecture("llama")
    grid = grid_of(section, 2)
    for rank, real in enumerate(pool.run(2, allocated, "llama", split, "policy", False)):
        assert real == frozen_states(parameter_shapes(model, grid, rank), section)
    for rank, real in enumerate(pool.run(2, allocated, "llama", split, "value", True)):
        plan = trained_states(parameter_shapes(model.with_scalar_head(), grid, rank), section, grid)
        assert real.weights == pytest.approx(plan.weights, rel=0.01)
