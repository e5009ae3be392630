"""Kernels of Triton in vLLM, written out in torch: Triton's interpreter cannot run them, or takes minutes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.hollow.solid import graphs
from tests.hollow.solid.mode import on_host


class WrittenOut:
    """A kernel of Triton, called as `kernel[grid](...)`, that a function computes in the memory of the device."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **keywords: Any) -> None:
        given, named = tree_map(on_host, (arguments, keywords))
        graphs.do(lambda: self._compute(*given, **named))


def multiply_by_experts(
    x: Tensor,
    experts: Tensor,
    result: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    scale: Tensor | None,
    weights: Tensor | None,
    order: Tensor | None,
    of_block: Tensor,
    num_padded: Tensor,
    *sizes: int,
    top_k: int,
    **settings: Any,
) -> None:
    """Compute Triton's `fused_moe_kernel`: [n, K] tokens, each by its experts of [experts, N, K], to [n, top k, N].

    Without `order` each of the n * top k products has a block of its own.
    """
    assert x_scale is scale is None
    places, rows = torch.arange(len(of_block)), result.flatten(0, 1)
    if order is not None:
        places = order[: num_padded.item()].long()
        of_block = of_block.repeat_interleave(settings["BLOCK_SIZE_M"])[: len(places)]
    for expert in of_block.unique().tolist():
        chosen = places[of_block[: len(places)] == expert]
        chosen = chosen[chosen < rows.shape[0]]
        product = x[chosen // top_k].float() @ experts[expert].float().T
        if bias is not None:
            product += bias[expert].float()
        rows[chosen] = (product * weights.flatten()[chosen, None] if settings["MUL_ROUTED_WEIGHT"] else product).to(
            rows.dtype
        )


def multiply_by_experts_in_torch(module: Any) -> None:
    """Let torch multiply by experts: Triton's interpreter would take a minute for a step."""
    module.fused_moe_kernel = WrittenOut(multiply_by_experts)


def filter_tokens_in_torch(module: Any) -> None:
    """Let torch filter the most likely tokens: Triton cannot interpret vLLM's kernel for it."""

    def apply(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, top_k, top_p)

    module.apply_top_k_top_p_triton = apply
