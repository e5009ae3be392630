"""The engine's norms on the CPU are those that vLLM defines, and it starts without other libraries."""

import os

import pytest
import torch

from megarl.rollout.patches import start_isolated
from megarl.rollout.patches.kernels import normalize_by_kernels


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(5, 64), (5, 4, 64)])
def test_kernels_normalize_as_the_formula_does(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this build of vLLM has no kernels for the CPU")
    current_platform.import_kernels()
    normalize_by_kernels()
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    with start_isolated():
        config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        norm = RMSNorm(shape[-1], eps=1e-3, dtype=dtype)
    norm.weight.data = torch.randn(shape[-1], generator=generator).to(dtype)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (x, transposed):
        torch.testing.assert_close(norm(given), norm.forward_native(x), rtol=tolerance, atol=tolerance)
    found, expected = norm(x.clone(), residual.clone()), norm.forward_native(x.clone(), residual.clone())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not torch.equal(found[1], residual)


def test_start_of_an_engine_preloads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this build of vLLM preloads nothing")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with start_isolated():
        VllmConfig()
        assert "LD_PRELOAD" not in os.environ  # a program that starts now would look for its parts
