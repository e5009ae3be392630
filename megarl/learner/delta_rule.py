"""The gated delta rule over packed sequences, and the causal convolution before it.

Each head has a matrix S as its memory, which is zero at the start of a sequence. Token t with query q, key k, value v,
decay a in (0, 1] and strength b in (0, 1] reads and writes it (Yang et al., 2024, arXiv:2412.06464, equation 10):

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T        o_t = S_t^T q_t

Chunks of tokens are computed at once. Within a chunk the corrections u_t = b_t (v_t - a_t S_{t-1}^T k_t) solve a
triangular system, which is linear in the memory at the start of the chunk (the UT transform of Yang et al., 2024,
arXiv:2406.06484, section 3.2): so the loop is over chunks alone.
"""

import torch
from torch import Tensor

from megarl.learner.packed import places_of
from megarl.models.linear import CHUNK
from megarl.platform.device import to_device


class Chunks:
    """The sequences of a packed row in chunks. The first chunks of all sequences come first, then the second ones.

    Longer sequences come before shorter ones: so those that have an n-th chunk are the first of those that have a
    chunk before it.
    """

    def __init__(self, lengths: Tensor, device: torch.device, size: int = CHUNK) -> None:
        """Divide sequences of `lengths` [S] int64, a tensor of the host, into chunks of `size` tokens on `device`."""
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        position = places_of(lengths, 0, 1)[1]
        rank = lengths.argsort(descending=True, stable=True).argsort()  # of the sequences, by length
        counts = [int((lengths > start).sum()) for start in range(0, int(lengths.max()), size)]
        before = torch.tensor([0, *counts]).cumsum(0)
        chunk = before[position // size] + rank[sequence]
        self.size = size
        self.counts = counts  # of the n-th chunks, for each n
        self.positions = to_device(position, device)  # [N] int64, of the tokens in their sequences
        self._cells = to_device(chunk * size + position % size, device)  # [N], of the tokens in all chunks

    def spread(self, tokens: Tensor) -> Tensor:
        """Return [chunks, heads, size, ...] of [N, heads, ...], zero behind the end of a sequence."""
        room = tokens.new_zeros(sum(self.counts) * self.size, *tokens.shape[1:])
        return room.index_copy(0, self._cells, tokens).unflatten(0, (-1, self.size)).transpose(1, 2)

    def collect(self, chunks: Tensor) -> Tensor:
        """Return [N, heads, ...] of [chunks, heads, size, ...]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self._cells)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, chunks: Chunks
) -> Tensor:
    """Return what each token reads from the memory of its sequence, [N, heads, value_dim].

    Args:
        query: [N, heads, key_dim].
        key: [N, heads, key_dim].
        value: [N, heads, value_dim].
        log_decay: [N, heads], the logarithms of the decays.
        strength: [N, heads].
        chunks: the sequences of the row.
    """
    query, key, value, strength = (chunks.spread(each) for each in (query, key, value, strength[..., None]))
    decayed = chunks.spread(log_decay[..., None]).cumsum(-2)  # [chunks, heads, size, 1], since the start of the chunk
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=query.device).triu(1)
    between = (decayed - decayed.mT).masked_fill(later, -torch.inf).exp()  # from each earlier token to each token
    system = strength * (key @ key.mT) * between
    written = torch.linalg.solve_triangular(system, strength * value, upper=False, unitriangular=True)
    erased = torch.linalg.solve_triangular(system, strength * decayed.exp() * key, upper=False, unitriangular=True)
    scores = (query @ key.mT) * between
    to_end = (decayed[..., -1:, :] - decayed).exp() * key
    parts = zip(
        *(
            each.split(chunks.counts)
            for each in (written, erased, scores, decayed.exp() * query, to_end, decayed.exp())
        ),
        strict=True,
    )
    memory = query.new_zeros(chunks.counts[0], query.shape[1], query.shape[-1], value.shape[-1])
    outs = []
    for of_values, of_memory, inside, reading, writing, decay in parts:
        memory = memory[: len(of_values)]
        corrections = of_values - of_memory @ memory
        outs.append(reading @ memory + inside @ corrections)
        memory = decay[..., -1:, :] * memory + writing.mT @ corrections
    return chunks.collect(torch.cat(outs))


def causal_convolution(tokens: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return [N, channels]: each channel of each token is a sum over itself and the tokens before it in its sequence.

    Args:
        tokens: [N, channels].
        weight: [channels, width]; the last column is that of the token itself.
        positions: [N] int64, of the tokens in their sequences.
    """
    width = weight.shape[-1]
    total = tokens * weight[:, -1]
    for back in range(1, min(width, len(tokens))):
        earlier = torch.nn.functional.pad(tokens[:-back], (0, 0, back, 0))
        total = total + (earlier * weight[:, -1 - back]).masked_fill((positions < back)[:, None], 0.0)
    return total
