"""A micro-batch as Megatron takes it: sequences laid end to end in one row of tokens, nothing padded.

The last token of a sequence predicts nothing that is asked for, so it is not computed: a sequence of P prompt and R
response tokens takes P + R - 1 places, of which the last R predict the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import Rollouts


@dataclass(frozen=True, kw_only=True)
class Packed:
    """`b` samples of a batch as one row of `N` tokens."""

    samples: Tensor  # [b] int64: their rows in the batch
    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64, counted within each sequence
    sequences: Any  # Megatron's PackedSeqParams
    predictors: Tensor  # [R] int64: the places in the row that predict a response token
    targets: Tensor  # [R] int64: the response tokens, in the order of `predictors`
    mask: Tensor  # [b, T] bool: where those R numbers belong

    def unpack(self, per_token: Tensor) -> Tensor:
        """[b, T] from the [R] numbers of the response tokens, zero elsewhere; keeps the gradient."""
        return torch.zeros(self.mask.shape, device=per_token.device).masked_scatter(self.mask, per_token)


def pack_samples(batch: Rollouts, samples: Sequence[int], *, multiple_of: int, device: torch.device) -> Packed:
    """Lay the given samples of `batch` end to end on `device`.

    Sequence parallelism cuts the row into equal parts: `multiple_of` places are filled up with a sequence of zeros
    that nothing reads. Without samples the row is only such a sequence, for ranks that must take part in a micro-batch
    they have no samples for.
    """
    sequences = [[*batch.prompt_of(sample).token_ids, *batch.response_ids(sample)][:-1] for sample in samples]
    lengths = [len(sequence) for sequence in sequences]
    filling = -sum(lengths) % multiple_of if lengths else multiple_of
    if filling:
        sequences.append([0] * filling)
    index = torch.tensor(samples, dtype=torch.int64)
    mask = batch.mask[index]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    response_lengths = mask.sum(-1).tolist()
    predictors = [torch.arange(end - r, end) for end, r in zip(ends.tolist(), response_lengths, strict=True)]
    return Packed(
        samples=index,
        tokens=torch.tensor([sum(sequences, [])], device=device),
        positions=torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None].to(device),
        sequences=_bounds([len(sequence) for sequence in sequences], device),
        predictors=torch.cat(predictors).to(device) if predictors else torch.empty(0, dtype=torch.int64, device=device),
        targets=batch.responses[index][mask].to(device),
        mask=mask.to(device),
    )


def _bounds(lengths: list[int], device: torch.device) -> Any:
    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
