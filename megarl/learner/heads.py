"""Log-probabilities, entropies and exact divergences from hidden states, over a split vocabulary.

The vocabulary is split over the tensor-parallel ranks, and the tokens into chunks. At any moment only one chunk of one
rank's slice of the logits exists, in float32; the backward pass computes it again, unless there is memory to keep the
logits of all tokens. Ranks exchange only a few numbers per token.

No product is rounded to the weights' type: a logit of 16 in bfloat16 is off by up to 1/32, and the probability of its
token by 3 %. The engine keeps its logits in float32 too (`megarl.rollout.arguments.llm_arguments`).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.learner.context import Context
from megarl.learner.head_chunks import CHUNK_TOKENS as CHUNK_TOKENS
from megarl.learner.head_chunks import KEPT_BYTES as KEPT_BYTES
from megarl.learner.softmax import gradient, merge, moments
from megarl.learner.weight_gradient import WeightGradient
from megarl.platform.memory import unused_memory

KEPT_SHARE = 0.5
"""The share of a CUDA device's unused memory that a rank gives to logits beyond `KEPT_BYTES`.

As the head runs, a micro-batch has most of its activations, and the logits are gone before its layers run backwards.
"""
NEVER = -1e30  # the logit of rows that only pad the vocabulary: finite, so that p log p is 0 and not NaN


class VocabParallelLogProbs(torch.autograd.Function):
    """Log-probability of given tokens, and entropy, under `softmax(hidden @ weight.T / temperature)`."""

    @staticmethod
    def forward(
        ctx: Context[tuple[float, int, int]],
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        valid_rows: int,
        group: dist.ProcessGroup,
        with_entropy: bool,
        keeps: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `vocab_parallel_log_probs`; `keeps`: keep the logits of all tokens for the backward pass."""
        found = []
        kept = []
        first_row = dist.get_rank(group) * weight.shape[0]
        factor = _factor(weight)
        for chunk, chunk_targets in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            logits = _logits(chunk, factor, temperature, valid_rows)
            found.append(moments(logits, chunk_targets - first_row, with_entropy=with_entropy))
            if keeps:
                kept.append(logits)
        own = torch.cat(found, dim=1)
        maximum = own[0].clone()
        _all_reduce(maximum, dist.ReduceOp.MAX, group)
        sums = merge(own, maximum)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        picked, exponentials, *weighted = sums
        normalizer = exponentials.log() + maximum
        entropy = normalizer - weighted[0] / exponentials if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy, *kept)
        ctx.settings = temperature, valid_rows, first_row
        return picked - normalizer, entropy

    @staticmethod
    def backward(
        ctx: Context[tuple[float, int, int]], grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's slice; the caller's region sums the gradient of `hidden` over ranks."""
        hidden, weight, targets, normalizer, entropy, *kept = ctx.saved_tensors
        temperature, valid_rows, first_row = ctx.settings
        total = WeightGradient(weight) if ctx.needs_input_grad[1] else None
        grad_hidden = []
        factor = _factor(weight)
        per_token = [hidden, targets - first_row, normalizer, grad_log_probs / temperature]
        if grad_entropy is not None:
            per_token += [entropy, grad_entropy / temperature]
        for number, values in enumerate(zip(*(x.split(CHUNK_TOKENS) for x in per_token), strict=True)):
            chunk, places, log_sum, grad_log_prob, *of_entropy = values
            logits = kept[number] if kept else _logits(chunk, factor, temperature, valid_rows)
            grad_logits = gradient(logits, places, log_sum, grad_log_prob, of_entropy, weight.dtype)
            grad_hidden.append(_product(grad_logits, factor).to(hidden.dtype))
            if total:
                total.add(grad_logits, chunk)
        return torch.cat(grad_hidden), total.to_return() if total else None, *[None] * 6


def _logits(hidden: Tensor, factor: Tensor, temperature: float, valid_rows: int) -> Tensor:
    logits = _product(hidden, factor.T)
    if temperature != 1.0:
        logits /= temperature
    logits[:, valid_rows:] = NEVER
    return logits


def _all_reduce(x: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce `x` in place. A group of one rank has nothing to send."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, operation, group=group)


def _factor(weight: Tensor) -> Tensor:
    """Convert the weight once for all chunks, for `_product`: only the CPU needs a float32 copy."""
    return weight if weight.is_cuda else weight.float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b`, [m, n] float32: the products of bfloat16 numbers are exact in float32, and are summed in it."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities of `targets`, and entropies if asked for, over the whole vocabulary.

    Args:
        hidden: [N, hidden_size] final hidden states, equal on all ranks of `group`.
        weight: [rows, hidden_size] this rank's slice of the output embedding; the slice of rank r begins at r * rows.
        targets: [N] int64 token ids.
        temperature: divides the logits, as it does in the engine's sampler.
        vocab_size: rows of the whole embedding that are tokens; the rows behind them are padding.
        group: the tensor-parallel process group.
        with_entropy: whether to compute entropies. They cost another pass over the logits.

    Returns:
        Two [N] float32 tensors, equal on all ranks: log-probabilities, and entropies in nats or None.
    """
    valid_rows = _num_tokens(vocab_size, weight, group)
    keeps = torch.is_grad_enabled() and _fits(len(hidden) * len(weight) * torch.float32.itemsize, hidden.device)
    return VocabParallelLogProbs.apply(hidden, weight, targets, temperature, valid_rows, group, with_entropy, keeps)


def _num_tokens(vocab_size: int, weight: Tensor, group: dist.ProcessGroup) -> int:
    """Return how many rows of this rank's slice are tokens; the rows behind them pad the vocabulary."""
    return min(max(vocab_size - dist.get_rank(group) * len(weight), 0), len(weight))


def _fits(num_bytes: int, device: torch.device) -> bool:
    """Return whether a rank has the memory to keep logits. Ranks may differ: kept or not, the numbers are the same."""
    return num_bytes <= KEPT_BYTES or (device.type == "cuda" and num_bytes <= KEPT_SHARE * unused_memory(device))


class VocabParallelDivergence(torch.autograd.Function):
    """An exact divergence of two policies, each given as `softmax(hidden @ weight.T / temperature)`."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Divergence, float, int]],
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        divergence: Divergence,
        temperature: float,
        valid_rows: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """See `vocab_parallel_divergence`."""
        totals = []
        shifts = []
        factor = _factor(weight)
        ref_factor = _factor(ref_weight)
        for chunk, ref_chunk in zip(hidden.split(CHUNK_TOKENS), ref_hidden.split(CHUNK_TOKENS), strict=True):
            logits = _logits(chunk, factor, temperature, valid_rows)
            ref_logits = _logits(ref_chunk, ref_factor, temperature, valid_rows)
            normalizers = _normalizers(logits, ref_logits, group)
            summands = divergence.summands(
                _log_softmax(logits, *normalizers[:, 0]), _log_softmax(ref_logits, *normalizers[:, 1])
            )
            sums = torch.stack([x.sum(-1) for x in summands])
            _all_reduce(sums, dist.ReduceOp.SUM, group)
            totals.append(sums)
            shifts.append(normalizers)
        value, slope = torch.cat(totals, dim=1)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, slope, *torch.cat(shifts, dim=2).flatten(0, 1))
        ctx.settings = divergence, temperature, valid_rows
        return value

    @staticmethod
    def backward(ctx: Context[tuple[Divergence, float, int]], grad_divergence: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's slice; the caller's region sums the gradient of `hidden` over ranks."""
        hidden, weight, ref_hidden, ref_weight, *per_token = ctx.saved_tensors
        divergence, temperature, valid_rows = ctx.settings
        total = WeightGradient(weight) if ctx.needs_input_grad[1] else None
        grad_hidden = []
        factor = _factor(weight)
        ref_factor = _factor(ref_weight)
        per_token = [hidden, ref_hidden, grad_divergence / temperature, *per_token]
        for chunk, ref_chunk, *values in zip(*(x.split(CHUNK_TOKENS) for x in per_token), strict=True):
            grad, slope, maximum, ref_maximum, log_sum, ref_log_sum = values
            log_p = _log_softmax(_logits(chunk, factor, temperature, valid_rows), maximum, log_sum)
            log_q = _log_softmax(_logits(ref_chunk, ref_factor, temperature, valid_rows), ref_maximum, ref_log_sum)
            _, grad_logits = divergence.summands(log_p, log_q)
            grad_logits = grad_logits.sub_(log_p.exp_().mul_(slope[:, None])).mul_(grad[:, None]).to(weight.dtype)
            grad_hidden.append(_product(grad_logits, factor).to(hidden.dtype))
            if total:
                total.add(grad_logits, chunk)
        return torch.cat(grad_hidden), total.to_return() if total else None, *[None] * 6


def _normalizers(logits: Tensor, ref_logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [2, 2, N] float32 of both policies: the maxima over the whole vocabulary, and log sum e^(z - maximum)."""
    both = (logits, ref_logits)
    maxima = torch.stack([x.amax(-1) for x in both])
    _all_reduce(maxima, dist.ReduceOp.MAX, group)
    sums = torch.stack([(x - maximum[:, None]).exp_().sum(-1) for x, maximum in zip(both, maxima, strict=True)])
    _all_reduce(sums, dist.ReduceOp.SUM, group)
    return torch.stack([maxima, sums.log_()])


def _log_softmax(logits: Tensor, maximum: Tensor, log_sum: Tensor) -> Tensor:
    """Turn logits into log-probabilities in place: two small steps, as the maximum may be large and the sum small."""
    return logits.sub_(maximum[:, None]).sub_(log_sum[:, None])


def vocab_parallel_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    divergence: Divergence,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute an exact divergence of each next-token distribution from the reference's; see `Divergence`.

    The reference is given by its hidden states: thousands of numbers per token, compared with 100,000 logits.

    Args:
        hidden: [N, hidden_size] final hidden states of the policy, equal on all ranks of `group`.
        weight: [rows, hidden_size] this rank's slice of the policy's output embedding; rank r's begins at r * rows.
        ref_hidden: [N, ref_hidden_size] final hidden states of the reference; no gradient reaches them.
        ref_weight: [rows, ref_hidden_size] the reference's slice for the same tokens; no gradient reaches it.
        divergence: which one.
        temperature: divides the logits of both, as it does in the engine's sampler.
        vocab_size: rows of the whole embeddings that are tokens; the rows behind them are padding.
        group: the tensor-parallel process group.

    Returns:
        [N] float32, in nats, equal on all ranks.
    """
    assert len(weight) == len(ref_weight), f"{len(weight)} rows of the policy, {len(ref_weight)} of the reference"
    valid_rows = _num_tokens(vocab_size, weight, group)
    return VocabParallelDivergence.apply(
        hidden, weight, ref_hidden, ref_weight, divergence, temperature, valid_rows, group
    )
