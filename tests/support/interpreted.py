"""The head's Triton kernels against torch: `TRITON_INTERPRET=1 python -m tests.support.interpreted`.

Triton decides at its import whether it interprets, so this needs a process of its own.
"""

from itertools import product

import torch
from torch import Tensor

from megarl.learner import kernels, softmax

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
    found = kernels.gradient(logits, targets, normalizer, upstream[0], of_entropy, dtype)
    assert found.dtype == dtype
    expected = softmax.gradient(logits, targets, normalizer, upstream[0], of_entropy, dtype)
    torch.testing.assert_close(found, expected)


def main() -> None:
    """Compare all cases."""
    kernels.BLOCK = 8
    cases = list(product((6, 0), (torch.float32, torch.bfloat16), (1.0, 0.0, None)))
    for case in cases:
        compare(*case)
    print(f"{len(cases)} cases agree")


if __name__ == "__main__":
    main()
