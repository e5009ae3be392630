"""Inputs for the heads of a learner, and their results in bfloat16 against float64."""

import torch
import torch.distributed as dist

from megarl.algorithms.kl import Divergence
from megarl.learner import heads

VOCAB, ROWS, HIDDEN, TOKENS, TEMPERATURE = 37, 64, 8, 11, 0.7

REVERSE = Divergence()


def example() -> tuple[torch.Tensor, ...]:
    """Return hidden states [TOKENS, HIDDEN], a head [2 * ROWS, HIDDEN], targets [TOKENS] and gradients [2, TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(2 * ROWS, HIDDEN, generator=generator)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    upstream = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, targets, upstream


def plain_divergence(log_p: torch.Tensor, log_q: torch.Tensor, divergence: Divergence) -> torch.Tensor:
    """Return [N] divergences of [N, V] complete log-probabilities, as their definitions say."""

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if divergence.kind == "full":
        return kl(log_p, log_q)
    if divergence.kind == "full_forward":
        return kl(log_q, log_p)
    log_m = (divergence.beta * log_q.exp() + (1.0 - divergence.beta) * log_p.exp()).log()
    return divergence.beta * kl(log_q, log_m) + (1.0 - divergence.beta) * kl(log_p, log_m)


def in_bfloat16(device: str, divergence: Divergence = REVERSE) -> tuple[torch.Tensor, ...]:
    """Return results and gradients of the heads for bfloat16 inputs with logits up to 40, then float64 ones."""
    hidden, weight, targets, upstream = (tensor.to(device) for tensor in example())
    inputs = [(2 * hidden).bfloat16(), (2 * weight).bfloat16(), hidden.flip(0).bfloat16()]
    types = (torch.bfloat16, torch.float64)
    rounded, exact = ([x.to(dtype, copy=True).requires_grad_() for x in inputs] for dtype in types)
    settings = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "group": dist.group.WORLD}
    log_probs, entropy = heads.vocab_parallel_log_probs(rounded[0], rounded[1], targets, with_entropy=True, **settings)
    assert entropy is not None
    found = torch.stack(
        [
            log_probs,
            entropy,
            heads.vocab_parallel_divergence(
                rounded[0], rounded[1], rounded[2].detach(), rounded[1].detach(), divergence, **settings
            ),
        ]
    )
    log_p = (exact[0] @ exact[1][:VOCAB].T / TEMPERATURE).log_softmax(-1)
    log_q = (exact[2] @ exact[1][:VOCAB].T / TEMPERATURE).log_softmax(-1).detach()
    wanted = torch.stack(
        [
            log_p.gather(1, targets[:, None])[:, 0],
            -(log_p.exp() * log_p).sum(-1),
            plain_divergence(log_p, log_q, divergence),
        ]
    )
    for numbers in (found, wanted):
        (numbers * torch.stack([*upstream, upstream[0]])).sum().backward()
    gradients = [x.grad for x in (*rounded[:2], *exact[:2])]
    return tuple(tensor.cpu() for tensor in (found.detach(), wanted.detach(), *gradients))


def assert_not_rounded(found: torch.Tensor, wanted: torch.Tensor, *gradients: torch.Tensor) -> None:
    """Check what `in_bfloat16` returned: the results are exact, and the gradients are rounded only once."""
    torch.testing.assert_close(found.double(), wanted, rtol=0.0, atol=2e-5)
    for ours, theirs in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-6, atol=2**-6 * float(theirs.abs().max()))
