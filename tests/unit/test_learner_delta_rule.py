"""The gated delta rule in chunks, against a loop over the tokens of each sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.learner.delta_rule import Chunks, causal_convolution, gated_delta_rule

CPU = torch.device("cpu")
LENGTHS = ([5], [1], [3, 11, 1, 7, 4], [4, 4], [9, 2, 9])


def inputs_of(num_tokens: int, *, heads: int = 2, key_dim: int = 3, value_dim: int = 4) -> tuple[Tensor, ...]:
    """Return queries, keys, values, logarithms of decays, and strengths, in float64."""
    torch.manual_seed(num_tokens)
    query, key = (torch.randn(num_tokens, heads, key_dim, dtype=torch.float64) for _ in range(2))
    value = torch.randn(num_tokens, heads, value_dim, dtype=torch.float64)
    decay, strength = (torch.rand(num_tokens, heads, dtype=torch.float64) for _ in range(2))
    return query, torch.nn.functional.normalize(key, dim=-1), value, decay.log(), strength


def read_in_chunks(inputs: Any, lengths: list[int], size: int) -> Tensor:
    query, key, value, log_decay, strength = inputs
    return gated_delta_rule(query, key, value, log_decay, strength, Chunks(torch.tensor(lengths), CPU, size))


def token_by_token(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """Return what the tokens of one sequence read, by the definition."""
    memory = torch.zeros(query.shape[1], query.shape[2], value.shape[2], dtype=query.dtype)
    outs = []
    for q, k, v, a, b in zip(query, key, value, log_decay.exp(), strength, strict=True):
        memory = a[:, None, None] * memory
        known = torch.einsum("hkv,hk->hv", memory, k)
        memory = memory + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - known))
        outs.append(torch.einsum("hkv,hk->hv", memory, q))
    return torch.stack(outs)


@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_read_what_single_tokens_read(lengths: list[int], size: int) -> None:
    inputs: Any = [each.requires_grad_() for each in inputs_of(sum(lengths))]
    found = read_in_chunks(inputs, lengths, size)
    expected = torch.cat(
        [token_by_token(*parts) for parts in zip(*(each.split(lengths) for each in inputs), strict=True)]
    )
    torch.testing.assert_close(found, expected)
    target = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, target), torch.autograd.grad(expected, inputs, target), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_delta_rule_has_the_right_gradients() -> None:
    inputs: Any = [each.requires_grad_() for each in inputs_of(7, heads=1, key_dim=2, value_dim=2)]
    assert torch.autograd.gradcheck(lambda *given: read_in_chunks(given, [5, 2], 3), inputs)


@pytest.mark.parametrize("which", range(5))
def test_no_sequence_reads_another(which: int) -> None:
    lengths = [6, 9, 5]
    inputs = list(inputs_of(sum(lengths)))
    before = read_in_chunks(inputs, lengths, 4)
    inputs[which] = inputs[which].clone()
    inputs[which][6:15] *= 0.5
    changed = (read_in_chunks(inputs, lengths, 4) != before).flatten(1).any(1)
    assert not changed[:6].any() and changed[6:15].any() and not changed[15:].any()


def test_fast_decay_gives_finite_gradients() -> None:
    """The memory is forgotten within a chunk: the quotients of its decays would overflow."""
    query, key, value, _, strength = (each.float() for each in inputs_of(130))
    decay = torch.full((130, 2), -20.0, requires_grad=True)
    out = gated_delta_rule(query, key, value, decay, strength, Chunks(torch.tensor([130]), CPU))
    torch.testing.assert_close(out, (query * key).sum(-1, keepdim=True) * strength[..., None] * value)
    [gradient] = torch.autograd.grad(out.sum(), decay)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("lengths", [*LENGTHS, [2, 1]])
def test_convolution_begins_anew_in_each_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    positions = Chunks(torch.tensor(lengths), CPU).positions

    def expected(part: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(part.T[None], (3, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=3)[0].T

    def convolve(given: Tensor, by: Tensor) -> Tensor:
        return causal_convolution(given, by, positions)

    wanted = torch.cat([expected(part) for part in tokens.split(lengths)])
    torch.testing.assert_close(convolve(tokens, weight), wanted)
    assert torch.autograd.gradcheck(convolve, (tokens, weight))
