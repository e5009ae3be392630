"""Kernels of Triton for vLLM's gated delta rule, in torch: Triton cannot interpret them, or takes minutes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from tests.hollow.solid.triton_kernels import WrittenOut


def last_tensor(arguments: Sequence[Any]) -> Tensor:
    """Return the tensor that a kernel writes to: it follows the tensors that releases of vLLM add to a convolution."""
    *_, result = (argument for argument in arguments if isinstance(argument, Tensor))
    return result


def convolve_sequences(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    blocks: Tensor,
    continues: Tensor,
    starts: Tensor,
    *rest: Any,
    **settings: Any,
) -> None:
    """Compute Triton's `_causal_conv1d_fwd_kernel`: of [dim, tokens] of sequences, by weights of [dim, width].

    `states` are the last inputs of each sequence, [blocks, dim, at least width - 1]; a sequence has those before it if
    it `continues`. A sequence whose block is the last argument is padding.
    """
    assert not settings.get("IS_APC_ENABLED")  # vLLM 0.33 has no such setting
    result, padding = last_tensor(rest), rest[-1]
    dim, width = weight.shape
    for block, has_history, (start, end) in zip(
        blocks.tolist(), continues.tolist(), pairwise(starts.tolist()), strict=True
    ):
        if block == padding or start == end:
            continue
        history = states[block, :, : width - 1]
        inputs = torch.cat((history if has_history else torch.zeros_like(history), x[:, start:end]), dim=-1)
        outputs = conv1d(
            inputs.float()[None], weight.float()[:, None], None if bias is None else bias.float(), groups=dim
        )
        result[:, start:end] = (silu(outputs) if settings["SILU_ACTIVATION"] else outputs)[0].to(result.dtype)
        history.copy_(inputs[:, 1 - width :])


def step_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, blocks: Tensor, *rest: Any, **settings: Any
) -> None:
    """Compute Triton's `_causal_conv1d_update_kernel`: a token [n, dim, 1] of each sequence, by [dim, width]."""
    assert not (settings["IS_VARLEN"] or settings.get("IS_APC_ENABLED") or settings["IS_SPEC_DECODING"])
    result, padding = last_tensor(rest), rest[-1]
    rows = (blocks != padding).nonzero()[:, 0]
    chosen = blocks[rows].long()
    width = weight.shape[1]
    inputs = torch.cat((states[chosen, :, : width - 1], x[rows]), dim=-1)
    outputs = (inputs.float() * weight.float()).sum(-1, keepdim=True)
    if bias is not None:
        outputs += bias.float()[:, None]
    result[rows] = (silu(outputs) if settings["SILU_ACTIVATION"] else outputs).to(result.dtype)
    states[chosen, :, : width - 1] = inputs[:, :, 1:]


def gates(a: Tensor, b: Tensor, log_rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of decays, and the strengths of changes, [n, heads]."""
    return -log_rates.float().exp() * softplus(a.float() + bias.float()), b.float().sigmoid()


def split_heads(mixed: Tensor, heads: int, keys: int, values: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [n, key heads, K] and values [n, heads, V] of [n, (2 * key heads) * K + heads * V]."""
    query, key = mixed[:, : -heads * values].float().unflatten(-1, (2, -1, keys)).unbind(1)
    return query, key, mixed[:, -heads * values :].float().unflatten(-1, (heads, values))


def normal(states: Tensor) -> Tensor:
    """Return vectors [..., K] of length 1."""
    return states / (states.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def prepare_gated_delta_rule(**given: Any) -> None:
    """Compute Triton's `_fused_post_conv_kernel`: normalized queries and keys, values and gates of tokens."""
    assert given["APPLY_L2NORM"] and not given["OUTPUT_G_EXP"]
    query, key, value = split_heads(given["mixed_qkv_ptr"], given["HV"], given["K"], given["V"])
    decay, beta = gates(given["a_ptr"], given["b_ptr"], given["A_log_ptr"], given["dt_bias_ptr"])
    for name, found in (("q", normal(query)), ("k", normal(key)), ("v", value), ("g", decay), ("beta", beta)):
        given[f"{name}_ptr"].copy_(found)


def remember(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [..., V] of a token, and the state [..., V, K] after it; `decay` and `beta` are [...]."""
    state = state * decay.exp()[..., None, None]
    change = (value - (state * key[..., None, :]).sum(-1)) * beta[..., None]
    state = state + change[..., None] * key[..., None, :]
    return (state * query[..., None, :]).sum(-1), state


def step_gated_delta_rule(**given: Any) -> None:
    """Compute Triton's `fused_recurrent_gated_delta_rule_packed_decode_kernel`: a token of each of n sequences.

    Inputs `mixed_qkv` are [n, (2 * key heads) * K + heads * V], `a` and `b` are [n, heads], outputs `o` are
    [n, 1, heads, V], and the states `h0` and `ht` are [blocks, heads, V, K]. A sequence whose block is 0 is padding.
    """
    assert given["USE_QK_L2NORM_IN_KERNEL"]
    heads, values, keys = given["h0"].shape[1:]
    rows = (given["ssm_state_indices"] > 0).nonzero()[:, 0]
    blocks = given["ssm_state_indices"][rows].long()
    query, key, value = split_heads(given["mixed_qkv"][rows], heads, keys, values)
    query, key = (normal(states).repeat_interleave(heads // given["H"], dim=1) for states in (query, key))
    decay, beta = gates(given["a"][rows], given["b"][rows], given["A_log"], given["dt_bias"])
    outputs, state = remember(given["h0"][blocks].float(), query * given["scale"], key, value, decay, beta)
    given["o"].zero_()
    given["o"][rows, 0] = outputs.to(given["o"].dtype)
    given["ht"][blocks] = state.to(given["ht"].dtype)


def run_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    states: Tensor,
    starts: Tensor,
    result: Tensor,
    final_states: Tensor,
) -> None:
    """Run the gated delta rule over sequences, which lie behind one another.

    Queries and keys are [1, tokens, key heads, K], values [1, tokens, heads, V], gates [1, tokens, heads].
    """
    share = value.shape[2] // key.shape[2]
    queries, keys = (states[0].float().repeat_interleave(share, dim=1) for states in (query * scale, key))
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        state = states[sequence].float()
        for token in range(start, end):
            numbers = (values[0, token].float() for values in (value, decay, beta))
            result[0, token], state = remember(state, queries[token], keys[token], *numbers)
        final_states[sequence] = state


def convolve_in_torch(module: Any) -> None:
    """Let torch convolve: a grid asks for tensors, which Triton's interpreter hides, and a step takes seconds."""
    module._causal_conv1d_fwd_kernel = WrittenOut(convolve_sequences)
    module._causal_conv1d_update_kernel = WrittenOut(step_convolution)


def prepare_gated_delta_rule_in_torch(module: Any) -> None:
    """Let torch prepare the gated delta rule: Triton's interpreter would take seconds for each prompt."""
    module._fused_post_conv_kernel = WrittenOut(prepare_gated_delta_rule)


def run_gated_delta_rule_in_torch(module: Any) -> None:
    """Let torch run the gated delta rule over prompts: Triton cannot interpret vLLM's kernels for it."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor,
        **settings: Any,
    ) -> tuple[Tensor, Tensor, None, Tensor, None, None, None]:
        assert output_final_state and settings["core_attn_out"] is None
        result, final_states = torch.empty_like(v), torch.empty_like(initial_state, dtype=torch.float32)
        launch = WrittenOut(run_gated_delta_rule)[()]
        launch(q, k, v, g, beta, scale, initial_state, cu_seqlens, result, final_states)
        return g, result, None, final_states, None, None, None

    module.chunk_gated_delta_rule_fwd = run


def step_gated_delta_rule_in_torch(module: Any) -> None:
    """Let torch step the gated delta rule: Triton's interpreter would take half a minute for each step."""
    module.fused_recurrent_gated_delta_rule_packed_decode_kernel = WrittenOut(step_gated_delta_rule)
