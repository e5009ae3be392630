"""Vocabulary-parallel log-probabilities, entropies and divergences against the plain softmax, with their gradients."""

import math

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.kl import Divergence
from megarl.learner import heads
from tests.support.heads import (
    HIDDEN,
    ROWS,
    TEMPERATURE,
    TOKENS,
    VOCAB,
    assert_not_rounded,
    example,
    in_bfloat16,
    plain_divergence,
)
from tests.support.ranks import RankPool

DIVERGENCES = [Divergence(), Divergence("full_forward"), Divergence("full_js"), Divergence("full_js", 0.1)]


def sharded(chunk_tokens: int, rows: int, entropy_weight: float | None) -> tuple[torch.Tensor | None, ...]:
    """Return outputs and gradients of this rank; without a weight, entropies are not asked for."""
    heads.CHUNK_TOKENS = chunk_tokens
    hidden, weight, targets, upstream = example()
    upstream[1] *= entropy_weight or 0.0
    mine = weight[: dist.get_world_size() * rows].chunk(dist.get_world_size())[dist.get_rank()].clone()
    hidden.requires_grad_()
    mine.requires_grad_()
    log_probs, entropy = heads.vocab_parallel_log_probs(
        hidden,
        mine,
        targets,
        temperature=TEMPERATURE,
        vocab_size=VOCAB,
        group=dist.group.WORLD,
        with_entropy=entropy_weight is not None,
    )
    loss = (log_probs * upstream[0]).sum()
    if entropy is not None:
        loss = loss + (entropy * upstream[1]).sum()
    loss.backward()
    dist.all_reduce(hidden.grad)  # as Megatron's region in the backward pass
    assert hidden.grad is not None and mine.grad is not None
    return log_probs.detach(), None if entropy is None else entropy.detach(), hidden.grad, mine.grad


@pytest.mark.parametrize("entropy_weight", [1.0, 0.0, None])
@pytest.mark.parametrize("chunk_tokens", [3, 1024])
@pytest.mark.parametrize(("world_size", "rows"), [(1, ROWS), (2, ROWS), (2, 20)])
def test_equals_plain_softmax(
    pool: RankPool, world_size: int, rows: int, chunk_tokens: int, entropy_weight: float | None
) -> None:
    hidden, weight, targets, upstream = example()
    upstream[1] *= entropy_weight or 0.0
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden @ weight[:VOCAB].T / TEMPERATURE).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (torch.stack([log_probs, entropy]) * upstream).sum().backward()

    results = pool.run(world_size, sharded, chunk_tokens, rows, entropy_weight)
    for result in results:
        torch.testing.assert_close(result[0], log_probs.detach())
        torch.testing.assert_close(result[1], None if entropy_weight is None else entropy.detach())
        torch.testing.assert_close(result[2], hidden.grad)
    gathered = torch.cat([result[3] for result in results])
    assert weight.grad is not None
    torch.testing.assert_close(gathered, weight.grad[: len(gathered)])


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_values_are_not_rounded_before_gradient(pool: RankPool, divergence: Divergence) -> None:
    [numbers] = pool.run(1, in_bfloat16, "cpu", divergence)
    assert_not_rounded(*numbers)


def test_no_tokens(pool: RankPool) -> None:
    assert pool.run(2, empty) == [0, 0]


def added_to_a_buffer(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of two passes of both heads, by autograd, and what they add to a buffer of ones."""
    hidden, weight, targets, _ = example()
    heads.CHUNK_TOKENS = 3
    hidden, settings = hidden.to(dtype), {"temperature": 1.0, "vocab_size": VOCAB, "group": dist.group.WORLD}
    plain, buffered = (weight.to(dtype, copy=True).requires_grad_() for _ in range(2))
    buffered.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    for mine in (plain, buffered):
        for _ in range(2):
            log_probs, _ = heads.vocab_parallel_log_probs(hidden, mine, targets, with_entropy=False, **settings)
            kl = heads.vocab_parallel_divergence(
                hidden, mine, hidden.flip(0), weight.to(dtype), Divergence(), **settings
            )
            (log_probs.sum() + kl.sum()).backward()
    assert plain.grad is not None and buffered.grad is None
    return [plain.grad.float(), buffered.main_grad - 1.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_weight_gradient_is_added_directly_to_its_buffer(pool: RankPool, dtype: torch.dtype, tolerance: float) -> None:
    [(expected, added)] = pool.run(1, added_to_a_buffer, dtype)
    torch.testing.assert_close(added, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def empty() -> int:
    weight = torch.ones(ROWS, HIDDEN, requires_grad=True)
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    log_probs, entropy = heads.vocab_parallel_log_probs(
        hidden,
        weight,
        torch.zeros(0, dtype=torch.int64),
        temperature=1.0,
        vocab_size=VOCAB,
        group=dist.group.WORLD,
        with_entropy=True,
    )
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()
    return len(log_probs)


REF_HIDDEN = 6  # the reference may be another model of the same vocabulary


def two_policies() -> tuple[torch.Tensor, ...]:
    hidden, weight, _, upstream = example()
    generator = torch.Generator().manual_seed(1)
    ref_hidden = torch.randn(TOKENS, REF_HIDDEN, generator=generator)
    ref_weight = torch.randn(2 * ROWS, REF_HIDDEN, generator=generator)
    return hidden, weight, ref_hidden, ref_weight, upstream[0]


def sharded_divergence(chunk_tokens: int, rows: int, divergence: Divergence) -> tuple[torch.Tensor, ...]:
    heads.CHUNK_TOKENS = chunk_tokens
    hidden, weight, ref_hidden, ref_weight, upstream = two_policies()
    size, rank = dist.get_world_size(), dist.get_rank()
    mine, ref_mine = (whole[: size * rows].chunk(size)[rank].clone() for whole in (weight, ref_weight))
    hidden.requires_grad_()
    mine.requires_grad_()
    found = heads.vocab_parallel_divergence(
        hidden,
        mine,
        ref_hidden,
        ref_mine,
        divergence,
        temperature=TEMPERATURE,
        vocab_size=VOCAB,
        group=dist.group.WORLD,
    )
    (found * upstream).sum().backward()
    dist.all_reduce(hidden.grad)
    assert hidden.grad is not None and mine.grad is not None
    return found.detach(), hidden.grad, mine.grad


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize(
    ("world_size", "rows", "chunk_tokens"), [(1, ROWS, 3), (2, ROWS, 1024), (2, 20, 3), (4, 10, 1024)]
)
def test_divergence_is_that_of_plain_softmaxes(
    pool: RankPool, world_size: int, rows: int, chunk_tokens: int, divergence: Divergence
) -> None:
    hidden, weight, ref_hidden, ref_weight, upstream = two_policies()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden @ weight[:VOCAB].T / TEMPERATURE).log_softmax(-1)
    log_q = (ref_hidden @ ref_weight[:VOCAB].T / TEMPERATURE).log_softmax(-1)
    expected = plain_divergence(log_p, log_q, divergence)
    (expected * upstream).sum().backward()
    results = pool.run(world_size, sharded_divergence, chunk_tokens, rows, divergence)
    for result in results:
        torch.testing.assert_close(result[0], expected.detach())
        torch.testing.assert_close(result[1], hidden.grad)
    gathered = torch.cat([result[2] for result in results])
    assert weight.grad is not None
    torch.testing.assert_close(gathered, weight.grad[: len(gathered)])


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_a_policy_does_not_diverge_from_itself(pool: RankPool, divergence: Divergence) -> None:
    [(value, gradient)] = pool.run(1, divergence_from_itself, divergence)
    assert value < 1e-6
    assert gradient < 1e-6


def divergence_from_itself(divergence: Divergence) -> tuple[float, float]:
    hidden, weight, *_ = example()
    hidden.requires_grad_()
    found = heads.vocab_parallel_divergence(
        hidden, weight, hidden.detach(), weight, divergence, temperature=1.0, vocab_size=VOCAB, group=dist.group.WORLD
    )
    found.sum().backward()
    assert hidden.grad is not None
    return float(found.detach().abs().max()), float(hidden.grad.abs().max())


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_policies_that_exclude_each_other_have_finite_gradients(pool: RankPool, divergence: Divergence) -> None:
    value, *gradients = pool.run(1, far_apart, divergence)[0]
    assert all(gradient.isfinite().all() for gradient in gradients)
    limit = 2000.0 if divergence.kind != "full_js" else _entropy(divergence.beta)
    torch.testing.assert_close(value, torch.full_like(value, limit), rtol=1e-4, atol=1e-4)


def _entropy(beta: float) -> float:
    return -beta * math.log(beta) - (1.0 - beta) * math.log(1.0 - beta)


def far_apart(divergence: Divergence) -> tuple[torch.Tensor, ...]:
    """Two tokens: the policy always chooses the first, and the reference the second."""
    hidden, weight = torch.ones(3, 1, requires_grad=True), torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    found = heads.vocab_parallel_divergence(
        hidden,
        weight,
        torch.ones(3, 1),
        weight.detach().flip(0),
        divergence,
        temperature=1.0,
        vocab_size=2,
        group=dist.group.WORLD,
    )
    found.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return found.detach(), hidden.grad, weight.grad
