"""A micro-batch as Megatron takes it: sequences laid end to end in one row of tokens.

The last token of a sequence predicts nothing that is asked for, so it is not computed: a sequence of P prompt and R
response tokens takes P + R - 1 places, of which the last R predict the response. A model that reads samples in its own
tokens has other places before the response tokens, some of them before several.

Context parallelism deals each sequence out to `cp_size` ranks as Transformer Engine does: in 2 * cp_size equal pieces,
of which rank r has number r and number r from the end, so that causal attention is equally much work for all. Zeros at
its end make a sequence divisible; nothing before them sees them, and nobody reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import Rollouts


@dataclass(frozen=True, kw_only=True)
class Packed:
    """`b` samples of a batch as one row of tokens, of which this rank has `N`."""

    samples: Tensor  # [b] int64: their rows in the batch
    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64, counted within each sequence
    filling: Tensor | None  # [1, N] bool: places that only fill up the row; None: there are none
    sequences: Any  # Megatron's PackedSeqParams: where the sequences of the whole row start
    predictors: Tensor  # [R] int64: the places among the N that predict a response token
    targets: Tensor  # [R] int64: the response tokens, in the order of `predictors`
    mask: Tensor  # [b, T] bool: where those R numbers belong

    def unpack(self, per_token: Tensor) -> Tensor:
        """[b, T] from the [R] numbers of the response tokens, zero elsewhere; keeps the gradient."""
        return torch.zeros(self.mask.shape, device=per_token.device).masked_scatter(self.mask, per_token)


def pack_samples(
    batch: Rollouts,
    samples: Sequence[int],
    *,
    device: torch.device,
    num_parts: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> Packed:
    """Lay the given samples of `batch` end to end on `device` and keep the places of `cp_rank`.

    Sequence parallelism cuts the places of a rank into `num_parts` equal parts: a sequence of zeros that nothing reads
    fills them up. Without samples the row is only such a sequence, for ranks that must take part in a micro-batch they
    have no samples for.
    """
    step = sequence_multiple(cp_size)
    sequences = [[*batch.sequence(sample)][:-1] for sample in samples]
    padded = [len(sequence) + -len(sequence) % step for sequence in sequences]
    multiple = lcm(step, cp_size * num_parts)
    if missing := -sum(padded) % multiple if any(padded) else multiple:
        sequences.append([])
        padded.append(missing)
    tokens = [sequence + [0] * (length - len(sequence)) for sequence, length in zip(sequences, padded, strict=True)]
    used, lengths = torch.tensor([len(sequence) for sequence in sequences]), torch.tensor(padded)

    index = torch.tensor(samples, dtype=torch.int64)
    mask = batch.mask[index]
    starts = (lengths.cumsum(0) - lengths)[: len(samples)]
    predictors = (starts[:, None] + batch.predictors()[index])[mask]  # in the whole row, ascending
    places, positions = places_of(lengths, cp_rank, cp_size)
    filling = positions >= used.repeat_interleave(lengths // cp_size)
    mine = torch.isin(predictors, places)
    mask = mask.masked_scatter(mask, mine)
    return Packed(
        samples=index,
        tokens=torch.tensor(sum(tokens, []))[places][None].to(device),
        positions=positions[None].to(device),
        filling=filling[None].to(device) if filling.any() else None,
        sequences=_bounds(lengths, cp_size, device),
        predictors=torch.searchsorted(places, predictors[mine]).to(device),
        targets=batch.responses[index][mask].to(device),
        mask=mask.to(device),
    )


def sequence_multiple(cp_size: int) -> int:
    """What the length of every sequence must be a multiple of."""
    return 2 * cp_size if cp_size > 1 else 1


def places_of(lengths: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """The tokens that a rank of a context-parallel group has of a packed row.

    Args:
        lengths: [S] int64, of the sequences, multiples of `sequence_multiple(cp_size)`.
        cp_rank: whose places.
        cp_size: among how many ranks the sequences are dealt out.

    Returns:
        Two [N / cp_size] int64 tensors, in the order in which that rank holds its tokens: the places in the row of N
        tokens, ascending, and the positions within their sequences.
    """
    starts, shares = lengths.cumsum(0) - lengths, lengths // cp_size
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(shares)
    position = torch.arange(len(sequence), device=lengths.device) - (shares.cumsum(0) - shares)[sequence]
    if cp_size > 1:
        piece = (shares // 2)[sequence]
        from_the_end = lengths[sequence] - (cp_rank + 2) * piece  # of the second piece, less its first position here
        position = position + torch.where(position < piece, cp_rank * piece, from_the_end)
    return starts[sequence] + position, position


def _bounds(lengths: Tensor, cp_size: int, device: torch.device) -> Any:
    longest = int(lengths.max())
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    padded = ends if cp_size > 1 else None  # Transformer Engine asks for them with context parallelism
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
