"""Attention within groups of similar lengths equals attention within each sequence alone."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.learner.attention import Groups, similar
from megarl.learner.packed import places_of

HEADS, HEAD_DIM, SCALE = 4, 8, 0.7
lengths_of_sequences = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@dataclass(frozen=True)
class Share:
    """A place in a context-parallel group."""

    cp_rank: int
    cp_size: int

    def rank(self) -> int:
        return self.cp_rank

    def size(self) -> int:
        return self.cp_size


def alone(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attend in one sequence after the other, by the formula."""
    key, value = (part.repeat_interleave(HEADS // part.shape[1], dim=1) for part in (key, value))
    outs = []
    for q, k, v in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
        logits = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None, None].expand(HEADS, len(q), 1)], dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(q)], v))
    return torch.cat(outs)


@given(
    lengths=lengths_of_sequences,
    cp_size=st.sampled_from([1, 2]),
    num_groups=st.sampled_from([1, 2, HEADS]),
    window=st.none() | st.integers(1, 50),
    has_sinks=st.booleans(),
)
def test_groups_of_sequences_attend_as_each_alone(
    lengths: list[int], cp_size: int, num_groups: int, window: int | None, has_sinks: bool
) -> None:
    if cp_size > 1:
        lengths = [4 * length for length in lengths]
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [
        torch.randn(sum(lengths), num_heads, HEAD_DIM, generator=generator).requires_grad_()
        for num_heads in (HEADS, num_groups, num_groups)
    ]
    query, key, value = tokens
    sinks = torch.randn(HEADS, generator=generator).requires_grad_() if has_sinks else None
    tokens += [sinks] if sinks is not None else []
    expected = alone(query, key, value, lengths, window, sinks)
    slope = torch.randn(expected.shape, generator=generator)
    gradients = [torch.zeros_like(token) for token in tokens]
    for rank in range(cp_size):
        places = places_of(torch.tensor(lengths), rank, cp_size)[0]
        groups = Groups(torch.tensor(lengths), Share(rank, cp_size), torch.device("cpu"))
        repeats = HEADS // num_groups if has_sinks else 1
        keys, values = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        out = groups.attend(query[places], keys, values, SCALE, window, sinks)
        torch.testing.assert_close(out, expected[places])
        for total, part in zip(
            gradients, torch.autograd.grad(out, tokens, slope[places], retain_graph=True), strict=True
        ):
            total += part
    exact = list(torch.autograd.grad(expected, tokens, slope))
    torch.testing.assert_close(gradients, exact, rtol=1e-5, atol=1e-4)  # sums over up to 320 tokens


@given(lengths=lengths_of_sequences)
def test_padding_is_at_most_quarter_of_tokens(lengths: list[int]) -> None:
    ordered = sorted(lengths, reverse=True)
    counts = similar(ordered)
    assert sum(counts) == len(lengths) and all(counts)
    for group in torch.tensor(ordered).split(counts):
        assert len(group) * int(group.max()) <= 1.25 * int(group.sum())
