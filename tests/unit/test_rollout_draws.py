"""Tokens that are drawn for all requests at once have the right probabilities, and depend on no other request."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.patches.draws import BLOCK, Draws, draw, next_uniforms

SIZES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000]


def split_mix(seed: int, number: int) -> int:
    """SplitMix64 in Python's integers, step by step as published."""
    state, mask = seed, 2**64 - 1
    for _ in range(number + 1):
        state = (state + 0x9E3779B97F4A7C15) & mask
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 50)), min_size=1, max_size=5))
def test_numbers_are_those_of_split_mix(asked: list[tuple[int, int]]) -> None:
    draws = [Draws(seed) for seed, _ in asked]
    for each, (_, number) in zip(draws, asked, strict=True):
        each.set_offset(4 * number)
    expected = [((split_mix(*each) >> 12) + 0.5) / 2**52 for each in asked]
    assert next_uniforms(draws).tolist() == expected
    assert [each.num_drawn for each in draws] == [number + 1 for _, number in asked]


def test_first_random_number_of_seed_0_matches_publication() -> None:
    assert split_mix(0, 0) == 0xE220A8397B1DCDAF


def test_random_number_repeats_after_offset_reset() -> None:
    draws = Draws(7)
    first, second = (next_uniforms([draws]).item() for _ in range(2))
    draws.set_offset(draws.get_offset() - 4)
    assert next_uniforms([draws]).item() == second != first


@pytest.mark.parametrize("size", SIZES)
def test_sampled_token_matches_inverse_of_cumulative_distribution(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    probs = torch.rand(200, size, generator=generator) * (torch.rand(200, size, generator=generator) < 0.3)
    probs[:, size // 2] += 0.01
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    found = draw(probs, uniforms)
    ends = probs.double().cumsum(1)
    ends /= ends[:, -1:]
    starts = torch.nn.functional.pad(ends, (1, 0))
    rows = torch.arange(200)
    assert (starts[rows, found] - 1e-6 <= uniforms).all()
    assert (uniforms <= ends[rows, found] + 1e-6).all()
    assert (probs[rows, found] > 0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [2.0**-53, 1 - 2.0**-53])
def test_extreme_random_numbers_sample_possible_tokens(size: int, number: float) -> None:
    probs = torch.eye(size)
    found = draw(probs, torch.full((size,), number, dtype=torch.float64))
    assert torch.equal(found, torch.arange(size))


def test_frequencies_are_the_probabilities() -> None:
    num_rows, probs = 40_000, torch.rand(BLOCK + 9, generator=torch.Generator().manual_seed(1)) ** 4
    found = draw(probs.expand(num_rows, -1), next_uniforms([Draws(seed) for seed in range(num_rows)]))
    expected = num_rows * (probs / probs.sum()).double().numpy()
    counts = np.bincount(found.numpy(), minlength=len(probs))
    often = expected > 5
    chi_square = ((counts - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum()
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_a_draw_depends_on_no_other_row() -> None:
    generator = torch.Generator().manual_seed(3)
    probs, seeds = torch.rand(64, 1000, generator=generator).softmax(-1), range(64)
    together = draw(probs, next_uniforms([Draws(seed) for seed in seeds]))
    alone = [draw(probs[seed : seed + 1], next_uniforms([Draws(seed)])) for seed in seeds]
    assert torch.equal(together, torch.cat(alone))
