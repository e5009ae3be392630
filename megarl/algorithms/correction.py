"""The mismatch between the engine's and the trainer's probabilities: its measures and its correction.

With `rho_t = exp(log_probs_t - rollout_log_probs_t)`, the trainer's probability of a sampled token over the engine's,
tokens weighted by `rho` are samples of the trainer's policy. `rho` is that of a token or of a complete sequence. The
weights multiply the advantages: every policy loss in `losses`, except the penalty of `kl_cov`, is linear in a positive
factor of the advantages.

Shapes: `B` samples, `T` response tokens; `[B, T]` tensors are float32, `mask` is bool. Nothing carries a gradient.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT, bounded_exp
from megarl.algorithms.masked import masked
from megarl.columns import sample_sums

Level = Literal["token", "sequence", "geometric"]


def ratios(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, level: Level) -> Tensor:
    """Return the trainer's probability of each sampled token over the engine's, `[B, T]`; 1 under the mask.

    - `token`: `rho_t`, which ignores that the engine visits other states: biased, of low variance;
    - `sequence`: the product of the sequence's `rho_t`, on every token: unbiased, of high variance;
    - `geometric`: the geometric mean of the sequence's `rho_t`, on every token: comparable across lengths.

    The logarithms are clamped to +-20, see `bounded_exp`.
    """
    log_ratio = masked(log_probs, mask).double() - masked(rollout_log_probs, mask).double()
    if level != "token":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    return bounded_exp(log_ratio).to(torch.float32).expand(mask.shape).masked_fill(~mask, 1.0)


def truncated_weights(weights: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Return importance weights `min(rho, threshold)` `[B, T]`, zero under the mask.

    Ionides 2008, "Truncated Importance Sampling"; between engine and trainer: Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training".
    """
    return masked(weights.clamp(max=threshold), mask)


def accepted(weights: Tensor, mask: Tensor, *, lower: float, upper: float) -> Tensor:
    """Return whether the ratio is between the bounds, `[B, T]` bool; other tokens should teach nothing.

    Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch": masked
    importance sampling. A rejected token still counts in the denominators, as in its expectation.
    """
    return mask & (weights >= lower) & (weights <= upper)


def mismatch_sums(log_probs: Tensor, rollout_log_probs: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
    """Return the sums that `mismatch_means` needs, of each sample: `[B]` float64 tensors, zero without a token.

    `surplus` is the sum of `exp(d) - 1`, and `squares` that of its square, with `d = log_probs - rollout_log_probs`
    clamped as in `bounded_exp`.

    Args:
        log_probs: `[N]` of the trainer, for the tokens that count, sample after sample.
        rollout_log_probs: `[N]` of the engine.
        num_tokens: `[B]` int64, how many tokens of each sample count.
    """
    trainer = log_probs.to(torch.float64, copy=True)
    engine = rollout_log_probs.double()
    sums = {"trainer": sample_sums(trainer, num_tokens), "engine": sample_sums(engine, num_tokens)}
    log_ratio = trainer.sub_(engine)
    sums["log_ratio"] = sample_sums(log_ratio, num_tokens)
    surplus = log_ratio.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_().sub_(1.0)
    sums["surplus"] = sample_sums(surplus, num_tokens)
    return sums | {"squares": sample_sums(surplus.square_(), num_tokens), "num_tokens": num_tokens.double()}


def sums_of_rows(numbers: Tensor) -> Tensor:
    """Return the sum of each column of `[B, k]` numbers."""
    return numbers.sum(0)


def mismatch_means(sums: Mapping[str, Tensor], *, added: Callable[[Tensor], Tensor] = sums_of_rows) -> dict[str, float]:
    """How far trainer and engine are apart, as users know it, from the sums of each sample.

    Means over tokens, with `d = log_probs - rollout_log_probs`: `kl` of `-d` and `k3_kl` of `exp(d) - d - 1` estimate
    `KL(engine || trainer)`; `chi2_token` of `exp(2 d)`, less 1, its chi-square divergence. Means over sequences: the
    perplexities `training_ppl` and `rollout_ppl` of each sequence under either, their logarithms and differences, and
    `chi2_seq` of `exp(2 sum of d)`, less 1.

    Args:
        sums: of each sample, `[B]` float64, from `mismatch_sums`.
        added: adds the rows of `[B, k]` float64 numbers. It may add those of other ranks' samples.
    """
    trainer, engine, total, surplus, squares, lengths = (
        sums[name] for name in ("trainer", "engine", "log_ratio", "surplus", "squares", "num_tokens")
    )
    has_tokens = (lengths > 0).double()
    training, rollout = (-of_samples / lengths.clamp(min=1.0) for of_samples in (trainer, engine))
    of_tokens = {"kl": -total, "k3_kl": surplus - total, "chi2_token": 2.0 * surplus + squares}  # exp(2 d) - 1
    of_sequences = {
        "training_log_ppl": training,
        "training_ppl": training.exp() * has_tokens,
        "rollout_log_ppl": rollout,
        "rollout_ppl": rollout.exp() * has_tokens,
        "log_ppl_diff": training - rollout,
        "log_ppl_abs_diff": (training - rollout).abs(),
        "ppl_ratio": (training - rollout).exp() * has_tokens,
        "chi2_seq": bounded_exp(total) ** 2 - 1.0,
    }
    terms = [lengths, has_tokens, *of_tokens.values(), *of_sequences.values()]
    num_tokens, num_sequences, *totals = added(torch.stack(terms, dim=-1)).tolist()
    counts = [num_tokens] * len(of_tokens) + [num_sequences] * len(of_sequences)
    named = zip([*of_tokens, *of_sequences], totals, counts, strict=True)
    return {f"rollout_corr/{name}": found / max(count, 1.0) for name, found, count in named}


def token_mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`min(d^2, 1) / 2` of every token with `d = log_probs - rollout_log_probs`, and which tokens have one.

    Returns:
        `[B, T]` float32, zero elsewhere; `[B, T]` bool: under the mask, and finite on both sides.
    """
    difference = log_probs - rollout_log_probs  # float32 subtracts near numbers exactly
    judged = mask if difference.sum().isfinite() else mask & torch.from_numpy(np.isfinite(difference.numpy()))
    mismatch = difference.square_().clamp_(max=1.0).mul_(0.5)
    return mismatch if judged.numpy().all() else masked(mismatch, judged), judged
