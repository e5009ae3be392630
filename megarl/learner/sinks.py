"""Attention with sinks: the softmax of each head has one more logit in its denominator, which learns (gpt-oss).

Let x be the scores of a query, L = log sum e^x, s the sink of the head, and M = log(e^L + e^s). The probabilities are
e^(x - M): the output is e^(L - M) times the output without a sink. In the backward pass, the kernels of torch compute
probabilities from the scores and L, and subtract (gradient . output) from the gradient of each probability. So with M
and the new output in the place of L and the old output, they return the gradients of attention with sinks. The
gradient of s is the sum of -e^(s - M) (gradient . output) over the queries of the head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megarl.learner.context import Context

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries, keys and values -> output and L, [..., heads, queries]."""
Differentiate = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Gradient, queries, keys, values, output and L -> gradients of queries, keys and values."""


class Sinks(torch.autograd.Function):
    """The step from a kernel of attention to attention with sinks."""

    @staticmethod
    def forward(
        ctx: Context[Differentiate],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        attend: Attend,
        differentiate: Differentiate,
    ) -> Tensor:
        """Attend; `sinks` is [heads]."""
        out, of_scores = attend(query, key, value)
        total = torch.logaddexp(of_scores, sinks[:, None].to(of_scores.dtype))
        out = (out * _by_query((of_scores - total).exp(), out)[..., None]).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.settings = differentiate
        return out

    @staticmethod
    def backward(ctx: Context[Differentiate], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks."""
        query, key, value, sinks, out, total = ctx.saved_tensors
        of_inputs = ctx.settings(gradient, query, key, value, out, total)
        slopes = _by_query((gradient * out).sum(-1, dtype=total.dtype), out)
        of_sinks = -((sinks[:, None] - total).exp() * slopes)
        other = [dimension for dimension in range(total.dim()) if dimension != total.dim() - 2]
        return *of_inputs, of_sinks.sum(other).to(sinks.dtype), None, None


def _by_query(numbers: Tensor, out: Tensor) -> Tensor:
    """Bring one number of each query and head from the order of the kernel's L to the order of its output, or back."""
    return numbers.t() if out.dim() == 3 else numbers  # in a row of sequences: [heads, N] and [N, heads, head_dim]


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sinks: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Attend as torch's `scaled_dot_product_attention`, with `sinks` [heads]. Keys have as many heads as queries."""
    assert not enable_gqa, "keys and values must be repeated"
    if query.is_cuda:
        scores = query @ key.transpose(-1, -2) * scale
        visible = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if attn_mask is None else attn_mask
        scores = scores.masked_fill(~visible, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1] @ value
    options: dict[str, object] = {"dropout_p": 0.0, "is_causal": is_causal, "scale": scale}
    if attn_mask is not None:
        options["attn_mask"] = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    kernels = torch.ops.aten
    attend = partial(kernels._scaled_dot_product_flash_attention_for_cpu, **options)
    differentiate = partial(kernels._scaled_dot_product_flash_attention_for_cpu_backward, **options)
    out: Tensor = Sinks.apply(query, key, value, sinks, attend, differentiate)
    return out


def varlen_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    bounds: tuple[Tensor, Tensor, int, int],
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Attend as torch's `varlen_attn`, with `sinks` [heads]. Keys have as many heads as queries."""
    kernels = torch.ops.torch_attn
    causal = window_size == (-1, 0)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, of_scores, _ = kernels._varlen_attn(query, key, value, *bounds, causal, scale, list(window_size))
        return out, of_scores

    def differentiate(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none
        return kernels._varlen_attn_backward(*tensors, *bounds, causal, state, scale, list(window_size))

    attended: Tensor = Sinks.apply(query, key, value, sinks, attend, differentiate)
    return attended
