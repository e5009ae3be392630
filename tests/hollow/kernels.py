"""A kernel of Triton for the tests. Triton reads its source, so it is in a file."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def scaled_product(left: Any, right: Any, out: Any, SIZE: tl.constexpr) -> None:  # noqa: N803
    """Write twice the product of two [SIZE, SIZE] matrices of bfloat16."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    first, second = tl.load(left + places), tl.load(right + places)
    product = tl.dot(first + first, second)
    tl.store(out + places, product.to(tl.bfloat16))
