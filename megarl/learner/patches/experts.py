"""Experts: counts of tokens on the CPU, and a router without Transformer Engine."""

import torch

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace

COUNTS = declare_megatron(
    "megatron.core.transformer.moe.token_dispatcher",
    "maybe_move_tensor_to_cpu",
    reason="the numbers of tokens that experts exchange become host numbers only from CUDA tensors",
    upstream="megatron/core/transformer/moe/moe_utils.py: maybe_move_tensor_to_cpu",
    until="it converts CPU tensors as well if `as_numpy` is given",
)
ROUTER_GEMM = declare_megatron(
    "megatron.core.transformer.moe.moe_utils",
    "te_general_gemm",
    reason="in 0.16.1 the router reads a name that is defined only with Transformer Engine",
    upstream="megatron/core/transformer/moe/moe_utils.py: te_general_gemm; fixed in 0.19.2",
    until="0.16.1 is no longer supported",
)


def hand_out_counts_on_the_cpu() -> None:
    """Convert counts on the CPU to numpy: `all_to_all_single` does not take tensors as sizes."""

    def on_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    replace(COUNTS, maybe_move_tensor_to_cpu=on_host)


def route_without_transformer_engine() -> None:
    """Define the missing name as None, which the router tests for."""
    if not ROUTER_GEMM.is_present:
        replace(ROUTER_GEMM, te_general_gemm=None)
