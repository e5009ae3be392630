"""The work of a learner on CUDA, seen on the CPU through stand-ins; `tests/gpu` runs the real thing."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.learners import ACTOR, WARM_UP, learn_twice, make_test_learner, sizes, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.shards import names_of
from tests.support.stand_ins import LateStream, cuda_on_meta, lazy_adam, offloading
from tests.support.tiny import SIZES, VARIANTS

CHECKPOINTS = {"qwen2": ("qwen2", {})}


def left_on_the_host() -> dict[str, list[str]]:
    """Return the names of the tensors of each model that do not reach the device."""
    from transformers import CONFIG_MAPPING

    from megarl.learner.config import MegatronSection
    from megarl.learner.model import build_model
    from megarl.models.architecture import read_architecture
    from tests.support.ranks import fresh_mesh

    section, found = MegatronSection(dtype="bfloat16"), dict[str, list[str]]()
    with cuda_on_meta():
        mesh = fresh_mesh(section)
        for variant, changes in VARIANTS.items():
            settings = SIZES | changes
            config = CONFIG_MAPPING[settings.pop("model_type")](**settings).to_dict()
            for architecture in (read_architecture(config), read_architecture(config).with_scalar_head()):
                model = build_model(architecture, section, mesh, recompute=False)
                tensors = (*model.named_parameters(), *model.named_buffers())
                found[f"{variant} {architecture.scalar_head}"] = [name for name, x in tensors if not x.is_meta]
    return found


def test_models_are_built_on_device_without_transformer_engine() -> None:
    with RankPool() as pool:  # of its own: a patch of an earlier test would last in its process
        [found] = pool.run(1, left_on_the_host)
    assert len(found) == 2 * len(VARIANTS)
    assert {model: names for model, names in found.items() if names} == {}


def rest(source: Path, dtype: str) -> tuple[list[set[int]], list[dict[str, float]], list[dict[str, float]]]:
    """Return the addresses of the optimizer's state at rest, update by update, and the metrics with and without it."""
    from megarl.learner.batching import Budget
    from megarl.learner.optimizer import torch_optimizers

    def metrics(learner: Any) -> dict[str, float]:
        batch, budget = experience(), Budget(max_tokens=100, max_sequences=None)
        found: dict[str, float] = update(learner, [batch, batch], ACTOR, budget)
        return found

    stays = make_test_learner(source, {"dtype": dtype})
    expected = [metrics(stays) for _ in range(3)]
    with offloading():
        learner = make_test_learner(source, {"dtype": dtype, "optimizer_offload": True})
        places, found = list[set[int]](), list[dict[str, float]]()
        for _ in range(3):
            found.append(metrics(learner))
            [inner] = torch_optimizers(learner.optimizer.megatron)
            tensors = [value for state in inner.state.values() for value in state.values() if value.dim()]
            tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
            places.append({tensor.data_ptr() for tensor in tensors})
    return places, found, expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_optimizer_is_pinned_once_and_reloaded_correctly(
    pool: RankPool, checkpoints: dict[str, Path], dtype: str
) -> None:
    [(places, found, expected)] = pool.run(1, rest, checkpoints["qwen2"], dtype)
    assert len(places[0]) > 2
    assert places[0] == places[1] == places[2]
    assert found == expected


def save_at_rest(source: Path, to: Path) -> tuple[int, int]:
    """Return the copies to the device that an update and a save of an offloaded optimizer make."""
    from megarl.learner.batching import Budget
    from megarl.learner.checkpoint import save_learner
    from megarl.learner.staging import Staging

    with offloading():
        LateStream.num_copies = 0
        learner = make_test_learner(source, {"optimizer_offload": True})
        update(learner, [experience()], ACTOR, Budget(max_tokens=100, max_sequences=None))
        of_update = LateStream.num_copies
        save_learner(learner, to, Staging())
        return of_update, LateStream.num_copies - of_update


def test_an_optimizer_is_saved_from_where_it_rests(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    [(of_update, of_save)] = pool.run(1, save_at_rest, checkpoints["qwen2"], tmp_path)
    assert of_update > 0
    assert of_save == 0


def learn_offloaded(*args: Any) -> Any:
    with offloading():
        return learn_twice(*args)


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_learner_with_host_optimizer_resumes_exactly(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, distributed_optimizer: bool
) -> None:
    place = (checkpoints["qwen2"], "policy", {"optimizer_offload": True})
    [(metrics, outputs), _] = pool.run(2, learn_offloaded, *place, tmp_path, None, distributed_optimizer)
    [(metrics_again, outputs_again), _] = pool.run(2, learn_offloaded, *place, None, tmp_path, distributed_optimizer)
    assert metrics == metrics_again
    assert torch.equal(outputs, outputs_again)


def learn_deterministically(source: Path) -> Any:
    """Return whether each part of the work took only deterministic kernels: the forward pass, and Megatron's choice."""
    from megarl.learner.batching import Budget
    from megarl.platform.determinism import decide_determinism

    decide_determinism(True)
    learner = make_test_learner(source, {})
    seen = []

    def objective(*args: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return ACTOR(*args)

    objective.needs_entropy = True  # type: ignore[attr-defined]
    update(learner, [experience()], objective, Budget(max_tokens=100, max_sequences=None))
    return {*seen}, learner.modules[0].config.deterministic_mode, torch.are_deterministic_algorithms_enabled()


def test_deterministic_run_restricts_learner_to_deterministic_kernels(checkpoints: dict[str, Path]) -> None:
    with RankPool() as pool:  # of its own: the decision is for a process
        assert pool.run(1, learn_deterministically, checkpoints["qwen2"]) == [({True}, True, False)]


def learn_lazily(*args: Any) -> Any:
    with lazy_adam():
        return learn_twice(*args)


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_learner_with_apex_adam_resumes_exactly(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, distributed_optimizer: bool
) -> None:
    place = (checkpoints["qwen2"], "policy", sizes(1, 1))
    [(metrics, outputs), _] = pool.run(2, learn_lazily, *place, tmp_path, None, distributed_optimizer)
    [(metrics_again, outputs_again), _] = pool.run(2, learn_lazily, *place, None, tmp_path, distributed_optimizer)
    assert metrics == metrics_again
    assert torch.equal(outputs, outputs_again)


def save_at_once(source: Path, to: Path | None, load: Path | None, lazy: bool) -> dict[str, float]:
    """Save a learner that has not learned, or load one; return the metrics of its first two updates."""
    from megarl.learner.batching import Budget
    from megarl.learner.checkpoint import load_learner, save_learner
    from megarl.learner.staging import Staging

    with lazy_adam() if lazy else patch.dict({}):
        learner = make_test_learner(source, {}, optim=WARM_UP)
        if load:
            load_learner(learner, load)
        if to:
            writing = save_learner(learner, to, Staging())
            writing.write()
            writing.finish()
        batch, budget = experience(), Budget(max_tokens=100, max_sequences=None)
        update(learner, [batch], ACTOR, budget)
        metrics: dict[str, float] = update(learner, [batch], ACTOR, budget)
        return metrics


@pytest.mark.parametrize("lazy", [(True, True), (False, True), (True, False)])
def test_a_learner_is_saved_before_its_first_step(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, lazy: tuple[bool, bool]
) -> None:
    [saved] = pool.run(1, save_at_once, checkpoints["qwen2"], tmp_path, None, lazy[0])
    [loaded] = pool.run(1, save_at_once, checkpoints["qwen2"], None, tmp_path, lazy[1])
    assert loaded == (saved if lazy[0] == lazy[1] else pytest.approx(saved, rel=1e-4))


def carry(source: Path, to: Path | None, load: Path | None, has_extras: bool) -> Any:
    """Save a learner or load one; with extras, its norms keep a state with their weights, as Transformer Engine's."""
    from megarl.learner.norm import RMSNorm

    extras: dict[str, Any] = {
        "get_extra_state": lambda self: torch.empty(0, dtype=torch.uint8),
        "set_extra_state": lambda *_: None,
    }
    with patch.multiple(RMSNorm, create=True, **extras) if has_extras else patch.dict({}):
        return save_at_once(source, to, load, False)


@pytest.mark.parametrize("has_extras", [(False, True), (True, False)])
def test_a_checkpoint_moves_to_and_from_transformer_engine(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, has_extras: tuple[bool, bool]
) -> None:
    [saved] = pool.run(1, carry, checkpoints["qwen2"], tmp_path, None, has_extras[0])
    assert not [name for name in names_of(tmp_path) if "_extra_state" in name]
    [loaded] = pool.run(1, carry, checkpoints["qwen2"], None, tmp_path, has_extras[1])
    assert loaded == saved
