"""The random numbers of requests, which vLLM's first model runner draws from a generator of torch for each request.

They are drawn for all requests at once instead. Every number follows from the seed of its request and from how many
numbers the request drew before, and from no other request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megarl.platform.hashing import INCREMENT, hashed
from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

REASON = "a request with a seed costs a call of torch, or a kernel of a GPU, in each step"
UPSTREAM = "vllm/v1/sample/ops/topk_topp_sampler.py: random_sample ('This can be slow ... Optimize this')"
UNTIL = "requests with a seed are drawn together, as vLLM's second model runner does"
GENERATOR = declare_vllm(
    "vllm.v1.worker.gpu_input_batch:CachedRequestState",
    "__post_init__",
    reason=REASON,
    upstream=UPSTREAM,
    until=UNTIL,
)
SAMPLER = declare_vllm(
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
    "forward_native",
    "forward_cpu",
    reason=REASON,
    upstream=UPSTREAM,
    until=UNTIL,
)

OFFSETS = 4  # by which vLLM sets a generator back if the token that it drew is not used
BLOCK = 256  # tokens of a vocabulary that are summed before they are searched
BELOW_ONE = 1.0 - 2.0**-50


class Draws:
    """Stands for the torch.Generator of one request."""

    __slots__ = ("num_drawn", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_drawn = 0

    def get_offset(self) -> int:
        """Return what torch counts in an offset."""
        return OFFSETS * self.num_drawn

    def set_offset(self, offset: int) -> None:
        """Go back to an earlier offset."""
        self.num_drawn = offset // OFFSETS


def next_uniforms(draws: Sequence[Draws]) -> torch.Tensor:
    """Return the next number of each request, float64 [n] in (0, 1).

    SplitMix64 (Steele, Lea and Flood 2014, fig. 17): number i of a seed is a hash of seed + i INCREMENT.
    """
    seeds, counts = (np.array([getattr(each, name) for each in draws], np.uint64) for name in ("seed", "num_drawn"))
    for each in draws:
        each.num_drawn += 1
    numbers = hashed(seeds + (counts + np.uint64(1)) * INCREMENT)
    return torch.from_numpy(((numbers >> np.uint64(12)) + 0.5) / 2.0**52)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token of each row at which its distribution function passes the row's number.

    This is inversion (Devroye 1986, section III.2): one number and one reading of the probabilities for each token. It
    looks for the block of tokens first, and then in the block. A token of probability 0 is never drawn.

    Args:
        probs: float32 [n, V], not negative, of any sum above 0.
        uniforms: float64 [n], in (0, 1).

    Returns:
        int64 [n].
    """
    size = probs.shape[1]
    whole = size - size % BLOCK
    blocks = [probs[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1), probs[:, whole:].sum(-1, keepdim=True)]
    ends = torch.cat(blocks, 1).cumsum(-1, dtype=torch.float64)  # [n, blocks]
    wanted = uniforms.to(probs.device, non_blocking=True)[:, None].clamp(max=BELOW_ONE) * ends[:, -1:]
    number = torch.searchsorted(ends, wanted, right=True)
    places = number * BLOCK + torch.arange(BLOCK, device=probs.device)
    block = probs.gather(1, places.clamp(max=size - 1)).masked_fill(places >= size, 0.0)
    sums = block.cumsum(-1, dtype=torch.float64)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, number)
    rest = torch.minimum(wanted - before, BELOW_ONE * sums[:, -1:])
    return (number * BLOCK + torch.searchsorted(sums, rest, right=True))[:, 0]


def draw_together() -> None:
    """Draw the tokens of all requests at once. Requests without a seed share torch's generator."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def after_init(state: Any) -> None:
        GENERATOR.original("__post_init__")(state)
        if state.generator is not None:
            state.generator = Draws(state.generator.initial_seed())

    def sample(
        sampler: Any, logits: torch.Tensor, generators: Mapping[int, Any], k: Any, p: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the drawn tokens, int64 [n], and what the sampler is asked to return of all tokens, [n, V]."""
        logits = apply_top_k_top_p(logits, k, p)
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        returned = {"processed_logits": logits, "processed_logprobs": log_probs}.get(sampler.logprobs_mode)
        seeded = {row: draws for row, draws in generators.items() if isinstance(draws, Draws)}
        uniforms = torch.empty(len(logits), dtype=torch.float64)
        if len(seeded) < len(logits):
            uniforms.uniform_()
        if seeded:
            uniforms[list(seeded)] = next_uniforms([*seeded.values()])
        return draw(log_probs.exp(), uniforms), returned

    replace(GENERATOR, __post_init__=after_init)
    replace(SAMPLER, forward_native=sample, forward_cpu=sample)
