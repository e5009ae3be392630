"""Norms, which vLLM's CPU build has kernels for, and computes without them."""

from typing import Any

from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

NORM = declare_vllm(
    "vllm.model_executor.layers.layernorm:RMSNorm",
    "forward_cpu",
    reason="an engine that does not compile computes a norm by eight operations of torch",
    upstream="vllm/kernels/vllm_c.py: rms_norm, fused_add_rms_norm, which ask for a GPU",
    until="these kernels serve the CPU as well",
)


def normalize_by_kernels() -> None:
    """Compute norms by the kernels of vLLM's CPU build."""
    from torch import Tensor, empty_like, ops

    def normalize(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return what `forward_native` does; as there, `x` and `residual` may be overwritten if both are given."""
        if norm.variance_size_override is not None or not norm.has_weight or norm.weight.dtype != x.dtype:
            return norm.forward_native(x, residual)
        x = x.contiguous()
        if residual is None:
            out = empty_like(x)
            ops._C.rms_norm(out, x, norm.weight.data, norm.variance_epsilon)
            return out
        ops._C.fused_add_rms_norm(x, residual, norm.weight.data, norm.variance_epsilon)
        return x, residual

    replace(NORM, forward_cpu=normalize)
