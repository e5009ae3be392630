"""The other splits of a model: uneven and virtual pipelines, and sequences shared by several ranks.

Everything is compared with one rank, which `test_learner_split` compares with `transformers`.
"""

import json
from collections import Counter
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.policy import ActorSection
from megarl.learner.config import MegatronSection
from megarl.training.objectives import ActorObjective
from tests.support.learners import learn_twice, learner_outputs, make_test_learner, update
from tests.support.ranks import TIMEOUT_S, RankPool, fresh_mesh
from tests.support.records import experience

CHECKPOINTS = {
    "dense": ("qwen3-tied", {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 4}),
    "biases": ("gpt_neox", {"use_parallel_residual": False}),
    "parallel residual": ("gpt_neox", {}),
}
PIPELINE = {"pipeline_model_parallel_size": 2}
UNEVEN = PIPELINE | {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}}
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {  # world size, section
    "uneven": (2, UNEVEN),
    "virtual": (2, VIRTUAL),
    "context": (2, CONTEXT),
    "context-tensor": (4, CONTEXT | {"tensor_model_parallel_size": 2}),
    "context-virtual": (4, CONTEXT | VIRTUAL),
    "virtual-data": (4, VIRTUAL),
}
# Means over sequences: a rank with some tokens of a sequence must still divide by the number of all its tokens.
ACTOR = ActorObjective(ActorSection(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.01), horizon=8)


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    """A checkpoint with tied embeddings, and norms of queries and keys."""
    return checkpoints["dense"]


@pytest.fixture(scope="module")
def alone(pool: RankPool, checkpoint: Path) -> dict[str, dict[str, Any]]:
    return {role: pool.run(1, outputs, checkpoint, role, {}, 1000)[0] for role in ("policy", "value")}


def outputs(checkpoint: Path, role: str, split: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    return learner_outputs(checkpoint, role, split, max_tokens, ACTOR if role == "policy" else None)


def numbers(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [outputs.log_probs, outputs.entropy]


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize("name", SPLITS)
def test_no_split_shows(
    pool: RankPool, checkpoint: Path, alone: dict[str, dict[str, Any]], name: str, role: str
) -> None:
    world_size, split = SPLITS[name]
    expected = alone[role]
    runs = [pool.run(world_size, outputs, checkpoint, role, split, max_tokens) for max_tokens in (24, 1000)]
    for found in chain.from_iterable(runs):
        for ours, theirs in zip(numbers(found["before"]), numbers(expected["before"]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        for ours, theirs in zip(numbers(found["after"]), numbers(expected["after"]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def num_messages(checkpoint: Path, split: dict[str, Any]) -> list[float]:
    """Return the messages that this rank sends to other stages per micro-batch, in a forward pass and in an update."""
    import torch.distributed as dist

    from megarl.distributed.exchange import REDUCED
    from megarl.learner.batching import Budget

    learner, batch, budget = make_test_learner(checkpoint, split), experience(), Budget(max_tokens=24, max_sequences=2)
    num_micro_batches = len(learner.forward.divide(learner.spread(batch), budget, None))
    send, messages, counts = dist.ProcessGroup.send, list[Any](), list[float]()

    def counted(group: Any, tensors: Any, rank: int, tag: int) -> Any:
        if tag != REDUCED:
            messages.append(tensors)
        return send(group, tensors, rank, tag)

    with patch.object(dist.ProcessGroup, "send", counted):
        spread = learner.spread(batch)
        for run in (lambda: learner.infer(spread, budget), lambda: update(learner, [batch], ACTOR, budget)):
            messages.clear()
            run()
            counts.append(len(messages) / num_micro_batches)
    return counts


@pytest.mark.parametrize(("split", "expected"), [(PIPELINE, [[1, 1], [0, 1]]), (VIRTUAL, [[2, 3], [1, 3]])])
def test_stages_send_each_other_nothing_but_tensors(
    pool: RankPool, checkpoint: Path, split: dict[str, Any], expected: list[list[int]]
) -> None:
    """A chunk sends its output to the next chunk, and the gradient of its input to the one before."""
    assert pool.run(2, num_messages, checkpoint, split) == expected


def calls_of_layers(checkpoint: Path, recompute: Any) -> tuple[dict[str, float], float, float]:
    """Return the metrics of an update, and how often each attention and each feed-forward is computed."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, {}, recompute=recompute)
    layers = [layer for layer in learner.modules[0].modules() if isinstance(layer, TransformerLayer)]
    calls = Counter[str]()
    for layer in layers:
        parts = {"attention": layer.self_attention, "feed-forward": getattr(layer.mlp, "router", layer.mlp)}
        for name, part in parts.items():
            part.register_forward_hook(lambda *_, name=name: calls.update([name]))
    metrics = update(learner, [experience()], ACTOR, Budget(max_tokens=1000, max_sequences=None))
    return metrics, calls["attention"] / len(layers), calls["feed-forward"] / len(layers)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_computed_again_does_not_show(pool: RankPool, checkpoints: dict[str, Path], name: str) -> None:
    [(expected, *once)] = pool.run(1, calls_of_layers, checkpoints[name], False)
    assert once == [1, 1]
    for recompute, calls in (("selective", [1, 2]), (True, [2, 2])):
        [(metrics, *found)] = pool.run(1, calls_of_layers, checkpoints[name], recompute)
        assert found == calls
        assert metrics == pytest.approx(expected, rel=1e-6)


def places(checkpoint: Path, split: dict[str, Any]) -> tuple[Any, Any]:
    """Return this rank's coordinates and the layers of its chunks, first by the grid, then by Megatron."""
    import torch.distributed as dist
    from megatron.core import parallel_state as megatron

    from megarl.learner.model import build_model
    from megarl.models.architecture import read_architecture

    section = MegatronSection(dtype="float32", **split)
    mesh, rank = fresh_mesh(section), dist.get_rank()
    architecture = read_architecture(json.loads((checkpoint / "config.json").read_text()))
    chunks = [
        build_model(architecture, section, mesh, recompute=False, chunk=chunk)
        for chunk in range(mesh.vpp_size if mesh.grid.ep == 1 else 0)  # this model has no experts
    ]
    stage = mesh.grid.stage(rank)
    layers = [list(part) for part in mesh.grid.layers(stage, architecture.num_layers)] if chunks else []
    return (
        [*vars(mesh.grid.cut(rank)).values(), stage, mesh.grid.dp, layers],
        [
            megatron.get_tensor_model_parallel_rank(),
            megatron.get_tensor_model_parallel_world_size(),
            megatron.get_expert_model_parallel_rank(),
            megatron.get_expert_model_parallel_world_size(),
            megatron.get_expert_tensor_parallel_rank(),
            megatron.get_expert_tensor_parallel_world_size(),
            megatron.get_pipeline_model_parallel_rank(),
            megatron.get_data_parallel_world_size(),
            [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks],
        ],
    )


@pytest.mark.parametrize(
    "split",
    [
        UNEVEN,
        VIRTUAL | CONTEXT,
        PIPELINE | {"override_transformer_config": {"num_layers_in_last_pipeline_stage": 1}},
        VIRTUAL | {"override_transformer_config": {"num_layers_in_last_pipeline_stage": 2}},
        CONTEXT | {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        PIPELINE | {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2},
    ],
)
def test_the_grid_is_megatrons(pool: RankPool, checkpoint: Path, split: dict[str, Any]) -> None:
    for ours, theirs in pool.run(4, places, checkpoint, split):
        assert ours == theirs


def timeouts(split: dict[str, Any]) -> set[timedelta]:
    """Return after how long a collective is an error, in the groups of the world, of a mesh and of saves."""
    from megarl.learner.staging import Staging

    fresh_mesh(MegatronSection(**split))
    Staging().group(tuple(range(dist.get_world_size())))
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) > 10
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_all_groups_wait_as_long_as_the_world(pool: RankPool) -> None:
    expected = {timedelta(seconds=TIMEOUT_S["cpu"])}
    assert pool.run(2, timeouts, {"tensor_model_parallel_size": 2}) == [expected, expected]


def test_experts_and_chunks_and_shared_sequences_go_together(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    checkpoint = checkpoints["experts"]
    router = {"override_transformer_config": {"moe_z_loss_coeff": 0.05}}
    [expected] = pool.run(1, outputs, checkpoint, "policy", router, 1000)
    split = VIRTUAL | CONTEXT | router | {"expert_model_parallel_size": 2}
    for found in pool.run(4, outputs, checkpoint, "policy", split, 24):
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(found["before"].log_probs, expected["before"].log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["after"].log_probs, expected["after"].log_probs, rtol=1e-4, atol=1e-4)


def test_virtual_pipeline_checkpoint_resumes_under_any_split(pool: RankPool, checkpoint: Path, tmp_path: Path) -> None:
    expected, expected_outputs = pool.run(2, learn_twice, checkpoint, "policy", VIRTUAL, tmp_path, None, True)[0]
    metrics, outputs = pool.run(2, learn_twice, checkpoint, "policy", VIRTUAL, None, tmp_path, True)[0]
    assert metrics == expected
    assert torch.equal(outputs, expected_outputs)
    for split in ({}, UNEVEN, CONTEXT):
        metrics, outputs = pool.run(2, learn_twice, checkpoint, "policy", split, None, tmp_path, True)[0]
        assert metrics == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(outputs, expected_outputs, rtol=1e-4, atol=1e-4)
