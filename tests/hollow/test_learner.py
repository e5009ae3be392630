"""A learner on CUDA has the numbers of a learner on the CPU, in every split: loss, gradient, weights after an update.

The CPU is that of the same build of torch. Kernels are not tested: the CPU computes both sides. The tests are of
everything around them: devices, types, shapes, offload, groups and collectives, and the branches that only CUDA takes.
"""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.learners import learner_outputs
from tests.support.ranks import RankPool
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.hollow

TENSOR, PIPELINE, CONTEXT, EXPERT = (
    {f"{name}_parallel_size": 2} for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
OFFLOADED = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
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


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[RankPool]:
    """A process that sees no device: torch asks the device for its stream even in an update on the CPU."""
    with pytest.MonkeyPatch.context() as patch, RankPool() as pool:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(pool, "_context", multiprocessing.get_context("spawn"))
        pool.run(1, torch.cuda.device_count)
        patch.delenv("CUDA_VISIBLE_DEVICES")
        yield pool


@pytest.fixture(scope="module")
def on_cuda() -> Iterator[RankPool]:
    with RankPool("cuda") as pool:
        yield pool


# `learner_outputs` writes into the head of a value model, which is not there while parameters are offloaded.
CASES = [(name, "policy") for name in SPLITS] + [(name, "value") for name in SPLITS if "offloaded" not in name]


@pytest.mark.parametrize(("name", "role"), CASES)
def test_learner_on_cuda_matches_learner_on_cpu(
    tmp_path: Path, on_cpu: RankPool, on_cuda: RankPool, name: str, role: str
) -> None:
    check(tmp_path, on_cpu, on_cuda, name, role)


def test_offload_works_with_expandable_segments(
    tmp_path: Path, on_cpu: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with RankPool("cuda") as pool:
        check(tmp_path, on_cpu, pool, "offloaded", "policy")


def check(directory: Path, on_cpu: RankPool, on_cuda: RankPool, name: str, role: str) -> None:
    """Compare a learner on CUDA with one on the CPU."""
    variant, world_size, split = SPLITS[name]
    checkpoint = write_checkpoint(directory, variant)
    [expected] = on_cpu.run(1, learner_outputs, checkpoint, role, {}, 24)
    for found in on_cuda.run(world_size, learner_outputs, checkpoint, role, split, 24):
        assert expected["metrics"]["grad_norm"] > 0
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        for when, tolerance in (("before", 1e-5), ("after", 1e-4)):
            ours, theirs = (numbers(outputs[when]) for outputs in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def numbers(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else torch.stack([outputs.log_probs, outputs.entropy])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_experts_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    found, expected = (products_of_experts(device, dtype) for device in ("cuda", "cpu"))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def products_of_experts(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
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
