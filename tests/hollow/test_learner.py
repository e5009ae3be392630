"""A learner on CUDA has the numbers of a learner on the CPU, in every split: loss, gradient, weights after an update.

The CPU is that of the same build of torch. Kernels are not tested: the CPU computes both sides. The tests are of
everything around them: devices, types, shapes, offload, groups and collectives, and lines for CUDA.
"""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.lora import Lora
from tests.support.adapters import learn_together
from tests.support.learners import learner_outputs
from tests.support.ranks import RankPool
from tests.support.replays import recorded, replay, routed
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.hollow

TENSOR, PIPELINE, CONTEXT, EXPERT = (
    {f"{name}_parallel_size": 2} for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
OFFLOADED = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
FOUR_LAYERS = {"num_hidden_layers": 4}
SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {  # variant, world size, section
    "alone": ("qwen3-tied", 1, {}),
    "offloaded": ("qwen3-tied", 1, OFFLOADED),
    "tensor": ("qwen3-tied", 2, TENSOR),
    "pipeline": ("qwen3-tied", 2, PIPELINE),
    "context": ("qwen3-tied", 2, CONTEXT),
    "data": ("qwen3-tied", 2, {}),
    "tensor-data-offloaded": ("qwen3-tied", 4, TENSOR | OFFLOADED),
    "experts": ("qwen3_moe", 2, EXPERT),
    "latent": ("deepseek_v3", 2, TENSOR),
}
OTHER_SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "virtual": ("qwen3-tied", 2, VIRTUAL),
    "virtual-data": ("qwen3-tied", 4, VIRTUAL),
    "tensor-without-sequence": ("qwen3-tied", 2, TENSOR | {"sequence_parallel": False}),
    "experts-context": ("qwen3_moe", 2, EXPERT | CONTEXT),
    "experts-data": ("qwen3_moe", 4, EXPERT),
    **{field: ("qwen3-tied", 1, {field: True}) for field in OFFLOADED},
    **{variant: (variant, 1, {}) for variant in ("llama", "qwen2", "mixtral", "qwen2_moe", "deepseek_v2")},
}


@dataclass(frozen=True)
class OnCPU:
    """Checkpoints, and what learners on the CPU give on them. Each is made once."""

    pool: RankPool
    directory: Path
    _outputs: dict[tuple[Path, str], dict[str, Any]] = field(default_factory=dict)

    def checkpoint(self, variant: str, **overrides: Any) -> Path:
        """Return a checkpoint of a variant."""
        directory = self.directory / "-".join(map(str, (variant, *overrides.values())))
        return directory if directory.exists() else write_checkpoint(directory, variant, **overrides)

    def outputs(self, checkpoint: Path, role: str) -> dict[str, Any]:
        """Return the outputs of a learner on one rank."""
        key = checkpoint, role
        if key not in self._outputs:
            [self._outputs[key]] = self.pool.run(1, learner_outputs, checkpoint, role, {}, 24)
        return self._outputs[key]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCPU]:
    """A process that sees no device: torch asks the device for its stream even in an update on the CPU."""
    with pytest.MonkeyPatch.context() as patch, RankPool() as pool:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(pool, "_context", multiprocessing.get_context("spawn"))
        pool.run(1, torch.cuda.device_count)
        patch.delenv("CUDA_VISIBLE_DEVICES")
        yield OnCPU(pool, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def on_cuda() -> Iterator[RankPool]:
    with RankPool("cuda") as pool:
        yield pool


# `learner_outputs` writes into the head of a value model, which is not there while parameters are offloaded.
CASES = [
    *((name, "policy") for name in SPLITS),
    *((name, "value") for name in SPLITS if "offloaded" not in name),
    *((name, "policy") for name in OTHER_SPLITS),
]


@pytest.mark.parametrize(("name", "role"), CASES)
def test_learner_on_cuda_matches_learner_on_cpu(on_cpu: OnCPU, on_cuda: RankPool, name: str, role: str) -> None:
    check(on_cpu, on_cuda, name, role)


ADAPTED = {
    "offloaded": ("qwen3-tied", 1, OFFLOADED),
    "tensor": ("qwen3-tied", 2, TENSOR),
    "data-offloaded": ("qwen3-tied", 2, OFFLOADED),
    "experts-tensor-offloaded": ("qwen3_moe", 2, TENSOR | EXPERT | {"expert_tensor_parallel_size": 1} | OFFLOADED),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_on_cuda_match_those_on_cpu(on_cpu: OnCPU, on_cuda: RankPool, name: str) -> None:
    """Policy, critic and reference share frozen weights, which rest in one memory of the host."""
    variant, world_size, split = ADAPTED[name]
    checkpoint, lora = on_cpu.checkpoint(variant), Lora(rank=4, alpha=8.0)
    [(expected, _)] = on_cpu.pool.run(1, learn_together, checkpoint, lora, {}, True)
    for found, _ in on_cuda.run(world_size, learn_together, checkpoint, lora, split, True):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("world_size", "split"), [(1, {}), (2, CONTEXT)], ids=["alone", "context"])
def test_replay_on_cuda_matches_replay_on_cpu(
    on_cpu: OnCPU, on_cuda: RankPool, world_size: int, split: dict[str, Any]
) -> None:
    checkpoint, batch = on_cpu.checkpoint("qwen3_moe"), routed(2, with_scores=True)
    [expected] = on_cpu.pool.run(1, replay, checkpoint, {}, batch, 48)
    for found in on_cuda.run(world_size, replay, checkpoint, split, batch, 48):
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(numbers(found["after"]), numbers(expected["after"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("world_size", "split"), [(1, {}), (2, CONTEXT)], ids=["alone", "context"])
def test_choices_on_cuda_are_those_of_cpu(
    on_cpu: OnCPU, on_cuda: RankPool, world_size: int, split: dict[str, Any]
) -> None:
    checkpoint = on_cpu.checkpoint("qwen3_moe")
    [(_, expected, layers, _)] = on_cpu.pool.run(1, recorded, checkpoint, {}, 48)
    for _, routes, own_layers, _ in on_cuda.run(world_size, recorded, checkpoint, split, 48):
        assert own_layers == layers
        assert torch.equal(routes.sort(-1).values, expected.sort(-1).values)


def test_offload_works_with_expandable_segments(on_cpu: OnCPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with RankPool("cuda") as pool:
        check(on_cpu, pool, "offloaded", "policy")


def check(on_cpu: OnCPU, on_cuda: RankPool, name: str, role: str) -> None:
    """Compare a learner on CUDA with one on the CPU."""
    variant, world_size, split = (SPLITS | OTHER_SPLITS)[name]
    checkpoint = on_cpu.checkpoint(variant, **FOUR_LAYERS if VIRTUAL.items() <= split.items() else {})
    expected = on_cpu.outputs(checkpoint, role)
    for found in on_cuda.run(world_size, learner_outputs, checkpoint, role, split, 24):
        assert expected["metrics"]["grad_norm"] > 0
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        for when, tolerance in (("before", 1e-5), ("after", 1e-4)):
            ours, theirs = (numbers(outputs[when]) for outputs in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def numbers(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else torch.stack([outputs.log_probs, outputs.entropy])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_experts_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    found, expected = (products_of_experts(device, dtype) for device in ("cuda", "cpu"))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def products_of_experts(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the products of four experts, one without tokens, and the gradients of states and weights."""
    from megarl.learner.together import ProductByExpert

    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 16), (24, 8), *[(8, 16)] * 4]
    hidden, slope, *weights = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    for tensor in (hidden, *weights):
        tensor.requires_grad_().main_grad = torch.zeros_like(tensor, dtype=torch.float32)  # type: ignore[attr-defined]
    out = ProductByExpert.apply(hidden, [3, 0, 17, 4], *weights)
    out.backward(slope)
    sums = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
    return [tensor.detach().cpu() for tensor in (out, hidden.grad, *sums)]


def attended(query: Tensor, part: Tensor, window: int | None = None, sinks: Tensor | None = None) -> list[Tensor]:
    """Return the attention of two sequences with equal keys and values, and all gradients."""
    from megarl.learner import attention

    given = (query, part, part) if sinks is None else (query, part, part, sinks)
    tensors = [tensor.detach().requires_grad_() for tensor in given]
    queries, keys, values, *learnt = tensors
    ends = torch.tensor([0, 3, 8], dtype=torch.int32).cuda()
    bounds = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=5, max_seqlen_kv=5)
    out = attention._varlen(queries, keys, values, bounds, 0.25, window, *learnt)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]


def test_a_window_is_the_same_on_the_cpu() -> None:
    from megarl.learner.attention import Groups

    generator = torch.Generator().manual_seed(0)
    queries, part = (torch.randn(8, heads, 16, generator=generator).bfloat16() for heads in (4, 2))
    found = attended(queries.cuda(), part.cuda(), window=2)
    query, key, value = (tensor.float().requires_grad_() for tensor in (queries, part, part))
    alone: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    out = Groups(torch.tensor([3, 5]), alone, torch.device("cpu")).attend(query, key, value, 0.25, window=2)
    expected = [out, *torch.autograd.grad(out, [query, key, value], torch.ones_like(out))]
    torch.testing.assert_close([tensor.cpu().float() for tensor in found], expected, rtol=2e-2, atol=3e-2)


def test_sinks_are_the_same_on_the_cpu() -> None:
    from megarl.learner.attention import Groups

    generator = torch.Generator().manual_seed(0)
    queries, part = (torch.randn(8, 4, 16, generator=generator).bfloat16() for _ in range(2))
    logits = torch.randn(4, generator=generator)
    found = attended(queries.cuda(), part.cuda(), 2, logits.cuda())
    query, key, value, sinks = (tensor.float().requires_grad_() for tensor in (queries, part, part, logits))
    alone: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    out = Groups(torch.tensor([3, 5]), alone, torch.device("cpu")).attend(query, key, value, 0.25, 2, sinks)
    expected = [out, *torch.autograd.grad(out, [query, key, value, sinks], torch.ones_like(out))]
    torch.testing.assert_close([tensor.cpu().float() for tensor in found], expected, rtol=2e-2, atol=3e-2)


def test_torch_without_grouped_heads_attends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11, which gets a copy of the keys and values for each query head."""
    from megarl.learner import attention

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(8, heads, 16, generator=generator).cuda().bfloat16() for heads in (4, 2)]
    expected = attended(*tensors)
    monkeypatch.setattr(attention, "_groups_heads", lambda: False)
    torch.testing.assert_close(attended(*tensors), expected, rtol=2e-2, atol=2e-2)
