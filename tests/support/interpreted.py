"""The learner's Triton kernels against torch: `TRITON_INTERPRET=1 python -m tests.support.interpreted`.

Triton decides at its import whether it interprets, so this needs a process of its own.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.learner import softmax
from megarl.learner.kernels import norm as norm_kernels
from megarl.learner.kernels import rotary as rotary_kernels
from megarl.learner.kernels import softmax as kernels
from megarl.learner.norm import Normalization
from megarl.learner.rotary import Rotation

COLUMNS = 23  # neither a multiple of a block nor a power of two
NEVER = -1e30


def logits_and_targets(num_rows: int = 6) -> tuple[Tensor, Tensor]:
    """Return logits up to +-40, a row of padding alone, and targets; two targets are another rank's."""
    generator = torch.Generator().manual_seed(0)
    logits = 20.0 * torch.randn(num_rows, COLUMNS, generator=generator)
    logits[:, 20:] = NEVER
    logits[1:2] = NEVER
    targets = torch.tensor([0, 3, -1, COLUMNS, 19, 7])[:num_rows]
    return logits, targets


def compare(num_rows: int, dtype: torch.dtype, entropy_weight: float | None) -> None:
    """Compare sums and gradients; None: nobody asks for entropies."""
    logits, targets = logits_and_targets(num_rows)
    with_entropy = entropy_weight is not None
    sums = softmax.moments(logits, targets, with_entropy=with_entropy)
    torch.testing.assert_close(kernels.moments(logits, targets, with_entropy=with_entropy), sums)
    normalizer = sums[2].log() + sums[0]
    upstream = torch.linspace(-1.0, 2.0, 2 * num_rows).view(2, num_rows)
    of_entropy = list[Tensor]()
    if entropy_weight is not None:
        of_entropy = [normalizer - sums[3] / sums[2], entropy_weight * upstream[1]]
    expanded = upstream[0, :1].expand(num_rows)
    for slopes in (upstream[0], expanded, torch.stack([upstream[0], expanded], 1)[:, 0]):
        found = kernels.gradient(logits, targets, normalizer, slopes, of_entropy, dtype)
        expected = softmax.gradient(logits.clone(), targets, normalizer, slopes, of_entropy, dtype)
        torch.testing.assert_close(found, expected)
    assert found.dtype == dtype


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "of longer rows": lambda x: pad(x, (0, 3))[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x.new_tensor(0.5).expand(x.shape),
}
"""Tensors of the same shape whose numbers lie differently in memory."""


def compare_norm(num_rows: int, num_columns: int, layouts: tuple[str, str]) -> None:
    """Compare a norm and its gradients if input and gradient lie in memory as `layouts` name it."""
    generator = torch.Generator().manual_seed(num_rows)
    x, slope = (torch.randn(num_rows, num_columns, generator=generator) for _ in range(2))
    weight = torch.randn(num_columns, generator=generator)
    x[:1] = 0.0  # only epsilon is left
    x, slope = LAYOUTS[layouts[0]](x), LAYOUTS[layouts[1]](slope)
    leaves = [x.clone().requires_grad_(), weight.requires_grad_()]
    expected = Normalization.apply(*leaves, 1e-3)
    found, scale = norm_kernels.normalise(x, weight.detach(), 1e-3)
    torch.testing.assert_close(found, expected.detach())
    gradients = norm_kernels.gradients(x, weight.detach(), scale, slope)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, slope))


def compare_rotation(num_tokens: int, num_heads: int, num_pairs: int, *, neighbours: bool) -> None:
    """Compare a rotation of the first numbers of views of longer heads, and its gradient."""
    generator = torch.Generator().manual_seed(num_tokens)
    whole = torch.randn(num_tokens, num_heads, 2 * num_pairs + 5, generator=generator)
    x, angles = whole[..., :-2], torch.randn(num_tokens, 1, num_pairs, generator=generator)
    leaf, cosines, sines = x.clone().requires_grad_(), angles.cos(), angles.sin()
    expected = Rotation.apply(leaf, cosines, sines, neighbours)
    found = rotary_kernels.rotate(x, cosines, sines, from_neighbours=neighbours, to_neighbours=False)
    torch.testing.assert_close(found, expected.detach())
    [gradient] = torch.autograd.grad(expected, leaf, whole[..., 2:])
    back = rotary_kernels.rotate(whole[..., 2:], cosines, -sines, from_neighbours=False, to_neighbours=neighbours)
    torch.testing.assert_close(back, gradient)


def main() -> None:
    """Compare all cases."""
    kernels.BLOCK, norm_kernels.TILE, norm_kernels.PROGRAMS = 8, 32, 2
    cases = list(product((6, 0), (torch.float32, torch.bfloat16), (1.0, 0.0, None)))
    for case in cases:
        compare(*case)
    layouts = [("whole", name) for name in LAYOUTS] + [(name, "whole") for name in LAYOUTS]
    norms = list(product((7, 1, 0), (12, 40), layouts))
    for norm in norms:
        compare_norm(*norm)
    rotations = list(product((5, 0), (1, 3), (3, 4), (True, False)))
    for num_tokens, num_heads, num_pairs, neighbours in rotations:
        compare_rotation(num_tokens, num_heads, num_pairs, neighbours=neighbours)
    print(f"{len(cases) + len(norms) + len(rotations)} cases agree")


if __name__ == "__main__":
    main()
