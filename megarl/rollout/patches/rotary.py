"""Rotary position embedding on CPU."""

from functools import partial
from typing import Any

from torch import Tensor

from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

ROTATION = declare_vllm(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
    "forward_cpu",
    reason="the CPU kernel takes all heads of a token for one if the shape is [tokens, heads, head size]",
    upstream="https://github.com/vllm-project/vllm/pull/12777, which made the CUDA kernel accept this shape",
    until="the CPU kernel accepts this shape as well",
)


def rotate_heads_correctly() -> None:
    """Rotate queries and keys of shape [tokens, heads, head size] by the formula instead of the CPU kernel.

    Of megarl's families only latent attention has that shape.
    """
    kernel = ROTATION.original("forward_cpu")

    def rotate(rotary: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> object:
        forward = rotary.forward_native if query.dim() == 3 else partial(kernel, rotary)
        return forward(positions, query, key)

    replace(ROTATION, forward_cpu=rotate)
