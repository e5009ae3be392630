"""The length penalty, and the filter of groups of equal scores: pure functions of `[B]` tensors."""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the soft penalty of long responses (Yu et al. 2025, "DAPO", eq. 13).

    0 up to `max_length - buffer` tokens, then falling linearly to `-factor` at `max_length`, and constant beyond.

    Args:
        lengths: `[B]` tokens of each response.
        max_length: the most tokens a response may have.
        buffer: number of tokens before `max_length` over which the penalty grows; positive.
        factor: the largest penalty; the paper's is 1.

    Returns:
        `[B]` float32, to be added to the scores; never positive.
    """
    assert 0 < buffer <= max_length, f"a buffer of {buffer} in {max_length} tokens"
    excess = (lengths - (max_length - buffer)).to(torch.float32)
    return -factor * (excess / buffer).clamp(0.0, 1.0)


def scores_differ(scores: Tensor, groups: Tensor) -> Tensor:
    """Return whether the scores of each group differ: the filter of dynamic sampling (Yu et al. 2025, "DAPO", eq. 11).

    Equal scores give no group-relative advantage, so such a group only dilutes the mini-batch. For scores of 0 and 1
    this keeps the groups with right and wrong answers.

    Args:
        scores: `[B]` the metric that must differ.
        groups: `[B]` int64; equal values mark responses to the same prompt, in any order.

    Returns:
        `[B]` bool, equal within a group. False for a sample alone in its group.
    """
    assert scores.shape == groups.shape, f"{tuple(scores.shape)} scores, {tuple(groups.shape)} groups"
    _, member_of, counts = groups.unique(return_inverse=True, return_counts=True)
    lowest = torch.full((len(counts),), torch.inf, dtype=scores.dtype, device=scores.device)
    lowest = lowest.scatter_reduce(0, member_of, scores, "amin")
    highest = torch.full_like(lowest, -torch.inf).scatter_reduce(0, member_of, scores, "amax")
    return (lowest < highest)[member_of]
