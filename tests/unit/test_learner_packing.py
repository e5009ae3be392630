"""Balancing and packing: every sample occurs once, groups stay together, budgets hold, loads are even."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.learner.packing import pack, partition

LENGTHS = st.lists(st.integers(min_value=1, max_value=100), max_size=60)


Samples = tuple[list[int], list[int]]


@st.composite
def grouped_costs(draw: st.DrawFn) -> Samples:
    costs = draw(st.lists(st.integers(min_value=0, max_value=1000), max_size=60))
    groups = draw(st.lists(st.integers(min_value=0, max_value=12), min_size=len(costs), max_size=len(costs)))
    return costs, groups


def parts_of(samples: Samples, num_parts: int) -> list[int]:
    costs, groups = (torch.tensor(numbers, dtype=torch.int64) for numbers in samples)
    found: list[int] = partition(costs, groups, num_parts).tolist()
    return found


def part_by_part(samples: Samples, num_parts: int) -> list[int]:
    """Give each group, the longest first, to the part of least load; the first of those with fewest groups."""
    costs, groups = samples
    group_costs = {group: sum(c for c, g in zip(costs, groups, strict=True) if g == group) for group in groups}
    loads = [(0, 0)] * num_parts
    homes = {}
    for group in sorted(group_costs, key=lambda group: (-group_costs[group], groups.index(group))):
        homes[group] = loads.index(min(loads))
        load, num_groups = min(loads)
        loads[homes[group]] = (load + group_costs[group], num_groups + 1)
    return [homes[group] for group in groups]


def test_partition_by_hand() -> None:
    # group costs 9, 8, 5, 4: the groups of 9 and 8 begin the parts, 5 joins 8, 4 joins 9
    assert parts_of(([3, 6, 4, 4, 5, 1, 3], [0, 0, 1, 1, 2, 3, 3]), 2) == [0, 0, 1, 1, 1, 0, 0]


@given(grouped_costs(), st.integers(min_value=1, max_value=8))
def test_partition_equals_that_by_single_groups(samples: Samples, num_parts: int) -> None:
    assert parts_of(samples, num_parts) == part_by_part(samples, num_parts)


@pytest.mark.parametrize("most", [0, 3, 10**6])
@pytest.mark.parametrize("num_parts", [20, 64, 300])
def test_partition_over_many_parts_is_the_same(num_parts: int, most: int) -> None:
    """Equal costs, a few kinds of costs, and costs that all differ; some groups outweigh all others."""
    generator = torch.Generator().manual_seed(num_parts)
    costs = torch.randint(0, most + 1, (700,), generator=generator)
    costs[::100] *= 50
    samples = (costs.tolist(), torch.randint(0, 500, (700,), generator=generator).tolist())
    assert parts_of(samples, num_parts) == part_by_part(samples, num_parts)


@given(grouped_costs(), st.integers(min_value=1, max_value=8))
def test_partition_keeps_groups_and_fills_parts(samples: Samples, num_parts: int) -> None:
    parts, (_, groups) = parts_of(samples, num_parts), samples
    assert len(set(zip(groups, parts, strict=True))) == len(set(groups))
    assert len(set(parts)) == min(num_parts, len(set(groups)))


@given(grouped_costs(), st.integers(min_value=1, max_value=8))
def test_partition_load_is_at_most_mean_plus_group(samples: Samples, num_parts: int) -> None:
    costs, groups = samples
    parts = parts_of(samples, num_parts)
    group_costs = [sum(c for c, g in zip(costs, groups, strict=True) if g == group) for group in set(groups)]
    loads = [sum(c for c, p in zip(costs, parts, strict=True) if p == part) for part in range(num_parts)]
    assert max(loads) <= sum(costs) / num_parts + max(group_costs, default=0)


@given(LENGTHS, st.integers(min_value=100, max_value=400), st.none() | st.integers(1, 9), st.integers(1, 8))
def test_pack_keeps_every_sequence_once_within_both_budgets(
    lengths: list[int], max_tokens: int, max_sequences: int | None, num_bins: int
) -> None:
    bins = pack(lengths, max_tokens=max_tokens, max_sequences=max_sequences, num_bins=num_bins)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in indices) <= max_tokens for indices in bins)
    assert all(len(indices) <= (max_sequences or len(lengths)) for indices in bins)
    assert len(bins) >= num_bins


@given(LENGTHS, st.integers(min_value=100, max_value=400))
def test_pack_uses_at_most_twice_minimal_bins(lengths: list[int], max_tokens: int) -> None:
    bins = pack(lengths, max_tokens=max_tokens)
    assert len(bins) <= 2 * -(-sum(lengths) // max_tokens) + 1


def test_pack_is_even_rather_than_first_fit() -> None:
    # first-fit would give loads 9 and 3
    assert [sum(indices) for indices in pack([3, 3, 3, 3], max_tokens=9)] == [0 + 2, 1 + 3]


def test_pack_pads_with_empty_bins() -> None:
    assert pack([5], max_tokens=8, num_bins=3) == [[0], [], []]
    assert pack([], max_tokens=8) == [[]]


def test_pack_names_the_key_to_raise() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens.*at most 8.*ppo_max_token_len_per_gpu"):
        pack([1, 9], max_tokens=8)
