"""Balancing and packing: every sample occurs once, groups stay together, budgets hold, loads are even."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.learner.packing import pack, partition

LENGTHS = st.lists(st.integers(min_value=1, max_value=100), max_size=60)


@st.composite
def grouped_costs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    costs = draw(st.lists(st.integers(min_value=0, max_value=1000), max_size=60))
    groups = draw(st.lists(st.integers(min_value=0, max_value=12), min_size=len(costs), max_size=len(costs)))
    return costs, groups


def test_partition_by_hand() -> None:
    # group costs 9, 8, 5, 4: the groups of 9 and 8 begin the parts, 5 joins 8, 4 joins 9
    parts = partition([3, 6, 4, 4, 5, 1, 3], [0, 0, 1, 1, 2, 3, 3], 2)
    assert parts == [[0, 1, 5, 6], [2, 3, 4]]


@given(grouped_costs(), st.integers(min_value=1, max_value=8))
def test_partition_takes_each_sample_once_and_keeps_groups(sample: tuple[list[int], list[int]], num_parts: int) -> None:
    costs, groups = sample
    parts = partition(costs, groups, num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    homes = {(groups[index], number) for number, part in enumerate(parts) for index in part}
    assert len(homes) == len(set(groups))
    assert sum(bool(part) for part in parts) == min(num_parts, len(set(groups)))


@given(grouped_costs(), st.integers(min_value=1, max_value=8))
def test_partition_load_is_at_most_mean_plus_group(sample: tuple[list[int], list[int]], num_parts: int) -> None:
    costs, groups = sample
    group_costs = [sum(c for c, g in zip(costs, groups, strict=True) if g == group) for group in set(groups)]
    loads = [sum(costs[index] for index in part) for part in partition(costs, groups, num_parts)]
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
