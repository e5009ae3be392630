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

    def warmup(self, *arguments: Any, **keywords: Any) -> None:
        """Compile nothing."""

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


def normalize_and_gate(
    x: Tensor,
    result: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    mean: Tensor | None,
    scale: Tensor,
    x_stride: int,
    result_stride: int,
    gate_stride: int,
    num_rows: int,
    group_size: int,
    epsilon: float,
    **settings: Any,
) -> None:
    """Compute Triton's `layer_norm_fwd_kernel`: RMSNorm of [n, groups * size], then the gate; `scale` is 1/RMS."""
    assert settings["IS_RMS_NORM"] and settings["NORM_BEFORE_GATE"] and mean is None
    groups = x.float().unflatten(-1, (-1, group_size))
    inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True) + epsilon)
    scale.view(-1, num_rows).copy_(inverse.squeeze(-1).T)
    normal = (groups * inverse).flatten(-2) * weight.float()
    if bias is not None:
        normal += bias.float()
    if gate is not None:
        opening = gate.float().sigmoid()
        normal *= opening if settings["ACTIVATION"] == "sigmoid" else gate.float() * opening
    result.copy_(normal)


def normalize_and_gate_in_torch(module: Any) -> None:
    """Let torch normalize and gate: an engine's start does it for each head of thousands of tokens."""
    module._LAYER_NORM_FWD_KERNEL.kernel = WrittenOut(normalize_and_gate)


def normalize_and_rotate(
    query_and_gate: Tensor,
    key: Tensor,
    query_result: Tensor,
    key_result: Tensor,
    gate_result: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos_and_sin: Tensor,
    positions: Tensor,
    *sizes: Any,
    norm_beta: float,
    **settings: Any,
) -> None:
    """Compute Triton's `_fused_qk_rmsnorm_rope_gate_kernel`: RMSNorm and rotation of [n, heads * size], and the gates.

    Of `positions` [3, n] some pairs of numbers rotate by the time, others by the height or the width; [n] are times.
    """
    num_heads, num_key_heads, size, rotary, half, epsilon = sizes[-6:]
    queries, gates = query_and_gate.unflatten(-1, (num_heads, 2, size)).unbind(-2)
    gate_result.copy_(gates.flatten(-2))
    found = positions.view(-1, positions.shape[-1]).long()
    pair = torch.arange(half)
    axis = torch.zeros_like(pair)
    if settings["HAS_MROPE"]:
        axis[(pair % 3 == 1) & (pair < 3 * settings["MROPE_SECTION_H"])] = 1
        axis[(pair % 3 == 2) & (pair < 3 * settings["MROPE_SECTION_W"])] = 2
    angles = cos_and_sin.float()[found[axis].T]  # [n, half, rotary]
    cos, sin = (angles[:, pair, pair + start][:, None] for start in (0, half))
    for states, weight, result in (
        (queries, query_weight, query_result),
        (key.unflatten(-1, (num_key_heads, size)), key_weight, key_result),
    ):
        wide = states.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        normal = (wide * inverse * (weight.float() + norm_beta)).to(states.dtype).float()
        left, right, rest = normal.split((half, half, size - rotary), dim=-1)
        result.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1).flatten(-2))


def normalize_and_rotate_in_torch(module: Any) -> None:
    """Let torch normalize and rotate queries and keys: an engine starts with thousands of tokens."""
    module._fused_qk_rmsnorm_rope_gate_kernel = WrittenOut(normalize_and_rotate)


def filter_tokens_in_torch(module: Any) -> None:
    """Let torch filter the most likely tokens: Triton cannot interpret vLLM's kernel for it."""

    def apply(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, **hints: bool) -> Tensor:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, top_k, top_p)

    module.apply_top_k_top_p_triton = apply
