"""Rows of tokens that the ranks of a context-parallel group share (see `packed.py`).

Attention gathers all tokens of a row on each rank. Linear attention reads a sequence token by token, so ranks exchange
tokens for heads (Jacobs et al., 2023, arXiv:2309.14509): each rank gets all tokens of its part of the heads.
"""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from megarl.learner.context import Context
from megarl.learner.packed import Bounds, places_of
from megarl.learner.per_tensor import PerTensor
from megarl.platform.device import to_device

_orders = PerTensor["_RowOrder"]()  # by the bounds of the row


def gather_row(part: Tensor, bounds: Bounds, group: dist.ProcessGroup) -> Tensor:
    """Gather the [N, ...] tokens of a row, in order, from the [N / size, ...] of each rank of the group.

    The rank that holds a token receives the sum of its gradients over all ranks.
    """
    if group.size() == 1:
        return part
    order = _order(bounds, group, part.device)
    return selected(gather_from_sequence_parallel_region(part, group=group), order.in_row, order.by_rank)


def tokens_for_heads(part: Tensor, bounds: Bounds, group: dist.ProcessGroup) -> Tensor:
    """Return all tokens of a row, in order, of this rank's part of the heads.

    `part` is [N / size, heads, ...], of this rank's tokens. The result is [N, heads / size, ...].
    """
    if group.size() == 1:
        return part
    order = _order(bounds, group, part.device)
    by_heads = part.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)
    return selected(all_to_all(group, by_heads.contiguous()), order.in_row, order.by_rank)


def heads_for_tokens(part: Tensor, bounds: Bounds, group: dist.ProcessGroup) -> Tensor:
    """Return all heads of this rank's tokens of a row: the inverse of `tokens_for_heads`."""
    if group.size() == 1:
        return part
    order = _order(bounds, group, part.device)
    received: Tensor = all_to_all(group, selected(part, order.by_rank, order.in_row))
    return received.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


class _RowOrder:
    """The tokens of a row in the order of the ranks of a group, and in their own order."""

    def __init__(self, lengths: Tensor, size: int, device: torch.device) -> None:
        by_rank = torch.cat([places_of(lengths, rank, size)[0] for rank in range(size)])
        self.by_rank = to_device(by_rank, device)  # [N] int64: the places in the row of the first rank's tokens, ...
        self.in_row = to_device(by_rank.argsort(), device)  # [N] int64: the inverse


def _order(bounds: Bounds, group: dist.ProcessGroup, device: torch.device) -> _RowOrder:
    return _orders.get(bounds.cu_seqlens_q, partial(_RowOrder, bounds.lengths, group.size(), device))


class _Selection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[None], rows: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Context[None], gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


def selected(rows: Tensor, places: Tensor, back: Tensor) -> Tensor:
    """Return `rows[places]`, whose gradient is a selection too, and not the sum that torch computes.

    Args:
        rows: [n, ...].
        places: [m] int64; contains the number of each row.
        back: [n] int64, a place of each row in `places`. The row gets the gradient of this one: if `places` repeats a
            row, the gradients of its other places must be zero.
    """
    out: Tensor = _Selection.apply(rows, places, back)
    return out
