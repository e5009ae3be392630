"""Balancing of groups over ranks, and packing of sequences into token budgets.

Both functions are pure and deterministic: every rank computes the same result from the same lengths, without messages.
Both are greedy: the longest item goes first, into the least loaded part (Graham 1969), so no load exceeds the mean by
more than one item.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.columns import Integers
from megarl.distributed.evenly import fill_evenly
from megarl.platform.errors import UserError


def partition(costs: Tensor, groups: Tensor, num_parts: int) -> Tensor:
    """Spread items over `num_parts` parts of nearly equal cost, without splitting a group.

    `costs` and `groups`, both `[n]` int64, are those of samples, or of runs of samples. Returns the part of each item,
    `[n]` int64. A part is empty only if there are fewer groups than parts.
    """
    members = groups.numpy()
    if not len(members):
        return groups
    if (members[1:] > members[:-1]).all():
        return torch.from_numpy(_spread(costs.numpy(), num_parts))
    _, firsts, places = np.unique(members, return_index=True, return_inverse=True)
    numbers = np.argsort(np.argsort(firsts))[places]  # groups by their first members
    group_costs = np.bincount(numbers, costs.numpy()).astype(np.int64)
    return torch.from_numpy(_spread(group_costs, num_parts)[numbers])


def _spread(costs: Integers, num_parts: int) -> Integers:
    """Return the part of each group, `[G]`, from the costs of groups."""
    place_bits = len(costs).bit_length()
    part_bits = num_parts.bit_length()
    largest = costs.max()
    # a number for each group: how far it is from the largest cost, then its place
    keys = (largest - costs << place_bits) + np.arange(len(costs))
    keys.sort()
    # a part is a number: its load, then the number of its groups, so that groups of cost zero still spread, then itself
    steps = largest - (keys >> place_bits)
    steps <<= place_bits + part_bits
    steps += 1 << part_bits
    parts = np.empty_like(costs)
    parts[keys & (1 << place_bits) - 1] = fill_evenly(np.arange(num_parts), steps) & (1 << part_bits) - 1
    return parts


def pack(
    lengths: Sequence[int], *, max_tokens: int, max_sequences: int | None = None, num_bins: int = 1
) -> list[list[int]]:
    """Pack sequences into few, evenly filled bins of at most `max_tokens` tokens and `max_sequences` sequences.

    Returns the indices of each bin, ascending; every index occurs once. There are at least `num_bins` bins; the last
    are empty if there are too few sequences. Ranks that must run equal numbers of micro-batches pass the largest.

    Raises:
        UserError: a single sequence does not fit.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise UserError(
            f"sequence {lengths.index(longest)} has {longest} tokens, a micro-batch holds at most {max_tokens}: "
            "raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or max_token_len_per_gpu of supervised training"
        )
    fewest = max(num_bins, -(-sum(lengths) // max_tokens))
    if max_sequences is not None:
        fewest = max(fewest, -(-len(lengths) // max_sequences))

    most = max(fewest, len(lengths))  # one sequence per bin always fits
    while fewest < most:
        middle = (fewest + most) // 2
        if _fill(lengths, middle, max_tokens, max_sequences) is None:
            fewest = middle + 1
        else:
            most = middle
    bins = _fill(lengths, most, max_tokens, max_sequences)
    assert bins is not None
    return bins


def _fill(lengths: Sequence[int], num_bins: int, max_tokens: int, max_sequences: int | None) -> list[list[int]] | None:
    """Fill exactly `num_bins` bins, the longest sequence first, into the emptiest bin; None if a budget breaks."""
    open_bins = [(0, 0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not open_bins or open_bins[0][0] + lengths[index] > max_tokens:
            return None
        load, count, number = heapq.heappop(open_bins)
        bins[number].append(index)
        if count + 1 != max_sequences:
            heapq.heappush(open_bins, (load + lengths[index], count + 1, number))
    return [sorted(indices) for indices in bins]
