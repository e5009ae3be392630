"""A micro-batch in Megatron's form: sequences laid end to end in one row of tokens.

The last token of a sequence predicts no other token, so the model does not compute it: a sequence of P prompt and R
response tokens takes P + R - 1 places, and the last R places predict the response. If a model reads samples in its own
tokens, other places predict the response tokens, and one place may predict several.

Context parallelism deals each sequence out to `cp_size` ranks as Transformer Engine does. It cuts the sequence into
2 * cp_size equal pieces; rank r gets piece r and, counted from the end, piece r, so that causal attention is equal work
for all ranks. Zeros at the end of a sequence make its length divisible; no earlier token attends to them, and nothing
reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import Rollouts
from megarl.learner.dropout import token_keys
from megarl.platform.device import to_device


@dataclass(kw_only=True)
class Bounds(PackedSeqParams):
    """Megatron's record of the bounds of the sequences in a packed row."""

    lengths: Tensor  # [S] int64, a tensor of the host, which need not ask a device for them


@dataclass(frozen=True, kw_only=True)
class Packed:
    """`b` samples of a batch as one row of tokens; this rank has `N` tokens of the row."""

    samples: Tensor  # [b] int64, the samples' rows in the batch
    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64, counted within each sequence
    padding_mask: Tensor | None  # [1, N] bool, True for padding; None: there is no padding
    sequences: Bounds  # of the sequences in the whole row
    predictors: Tensor  # [R] int64, the places among the N that predict a response token
    targets: Tensor  # [R] int64, the response tokens, in the order of `predictors`
    scatter_index: Tensor  # [R] int64, the places of these tokens in a flat [b, T]
    shape: tuple[int, int]  # b, T
    routes: Tensor | None = None
    """`[N, L, k]` integers: the experts of each token in each of this rank's L layers that have a router.

    None: the routers choose.
    """
    keys: Tensor | None = None  # [N] int32, of the tokens, as `TokenDropout` takes them; None: nothing is dropped

    def unpack(self, per_token: Tensor) -> Tensor:
        """Return [b, T] from [R] numbers of the response tokens, zero elsewhere; keeps the gradient."""
        zeros = torch.zeros(self.shape[0] * self.shape[1], device=per_token.device)
        return zeros.index_copy(0, self.scatter_index, per_token).view(self.shape)


def pack_samples(
    batch: Rollouts,
    samples: Sequence[int],
    *,
    device: torch.device,
    num_parts: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    has_keys: bool = False,
) -> Packed:
    """Lay the given samples of `batch` end to end on `device` and keep the places of `cp_rank`.

    Sequence parallelism splits the places of a rank into `num_parts` equal parts: a sequence of zeros, which nothing
    reads, pads the row. Without samples the row is only such a sequence; a rank that has no samples for a micro-batch
    still takes part in it. With `has_keys` tokens have the keys of dropout.
    """
    index = torch.tensor(samples, dtype=torch.int64)
    batch = batch.select(index)
    tokens = batch.tokens()
    used = batch.lengths() - 1
    has_next = torch.ones_like(tokens, dtype=torch.bool)
    has_next[(used + 1).cumsum(0) - 1] = False
    used, lengths = _padded(used, cp_size, num_parts)
    places, positions = places_of(lengths, cp_rank, cp_size)
    padding_mask = positions >= used.repeat_interleave(lengths // cp_size)
    whole = _laid_out(tokens[has_next], used, lengths, padding=tokens.new_zeros(()))
    predictors, predicted = _own_predictors(batch, lengths, places)
    rows = batch.rows(predicted)
    routes = batch.routes
    if routes is not None:
        one_each = torch.arange(routes.shape[2], dtype=routes.dtype).expand(routes.shape[1:])
        routes = to_device(_laid_out(routes, used, lengths, padding=one_each)[places], device)
    keys = None
    if has_keys:
        keys = token_keys(tokens, batch.lengths())[has_next]
        keys = to_device(_laid_out(keys, used, lengths, padding=keys.new_zeros(()))[places], device)
    return Packed(
        samples=index,
        tokens=to_device(whole[places][None], device),
        positions=to_device(positions[None], device),
        padding_mask=to_device(padding_mask[None], device) if padding_mask.any() else None,
        sequences=_bounds(lengths, cp_size, device),
        predictors=to_device(predictors, device),
        targets=to_device(batch.responses[predicted].to(torch.int64), device),
        scatter_index=to_device(rows.flatten().nonzero()[:, 0], device),
        shape=(rows.shape[0], rows.shape[1]),
        routes=routes,
        keys=keys,
    )


def _padded(used: Tensor, cp_size: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Return the tokens, and the places in the row, of each sequence; the last may be the one that pads the row."""
    step = sequence_multiple(cp_size)
    lengths = used + -used % step
    total = int(lengths.sum())
    multiple = lcm(step, cp_size * num_parts)
    missing = -total % multiple if total else multiple
    if missing:
        used = torch.nn.functional.pad(used, (0, 1))
        lengths = torch.nn.functional.pad(lengths, (0, 1), value=missing)
    return used, lengths


def _own_predictors(batch: Rollouts, lengths: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predictors among this rank's places, and which response tokens they predict.

    Args:
        batch: `b` samples.
        lengths: [S] int64, places of each sequence in the row; the first `b` are those of the samples.
        places: [N] int64, this rank's places in the row.

    Returns:
        [R] int64, as in `Packed`; and bool, a column of the batch.
    """
    starts = (lengths.cumsum(0) - lengths)[: len(batch)]
    predictors = (starts.repeat_interleave(batch.num_tokens) + batch.predictors())[batch.mask]  # in the row, ascending
    number = torch.full((int(lengths.sum()),), -1).index_copy(0, places, torch.arange(len(places)))
    local = number[predictors]
    is_own = local >= 0
    return local[is_own], batch.mask.masked_scatter(batch.mask, is_own)


def _laid_out(values: Tensor, used: Tensor, lengths: Tensor, *, padding: Tensor) -> Tensor:
    """Lay sequences out in one row, [N, ...].

    Args:
        values: [sum(used), ...], of the tokens of the sequences end to end.
        used: [S] int64, tokens of each sequence.
        lengths: [S] int64, places of each sequence in the row.
        padding: [...], the value of the places behind the tokens of a sequence.
    """
    _, position = places_of(lengths, 0, 1)
    row = padding.repeat(len(position), *[1] * padding.ndim)
    row[position < used.repeat_interleave(lengths)] = values
    return row


def sequence_multiple(cp_size: int) -> int:
    """Return the number that must divide the length of every sequence."""
    return 2 * cp_size if cp_size > 1 else 1


def places_of(lengths: Tensor, cp_rank: int, cp_size: int, num_places: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the tokens of a packed row that one rank of a context-parallel group holds.

    Args:
        lengths: [S] int64, of the sequences, multiples of `sequence_multiple(cp_size)`.
        cp_rank: the rank in its group.
        cp_size: the size of the group.
        num_places: N / cp_size; without it, the host asks the device of `lengths` for it.

    Returns:
        Two [N / cp_size] int64 tensors, in the rank's order of tokens: the places in the row of N tokens, ascending,
        and the positions within the sequences.
    """
    starts = lengths.cumsum(0) - lengths
    shares = lengths // cp_size
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(shares, output_size=num_places)
    position = torch.arange(len(sequence), device=lengths.device) - (shares.cumsum(0) - shares)[sequence]
    if cp_size > 1:
        piece = (shares // 2)[sequence]
        from_the_end = lengths[sequence] - (cp_rank + 2) * piece  # offset of the second piece's positions
        position = position + torch.where(position < piece, cp_rank * piece, from_the_end)
    return starts[sequence] + position, position


def _bounds(lengths: Tensor, cp_size: int, device: torch.device) -> Bounds:
    longest = int(lengths.max())
    ends = to_device(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), device)
    padded = ends if cp_size > 1 else None  # Transformer Engine needs them for context parallelism
    return Bounds(
        lengths=lengths,
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
