"""Runs of samples against the samples themselves, one by one."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.distributed.runs import Runs

SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12)
Samples = list[tuple[int, int]]  # prompt and share


def columns(samples: Samples) -> tuple[Tensor, Tensor]:
    groups, owners = torch.tensor(samples, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return groups, owners


def samples_of(runs: Runs) -> Samples:
    groups, owners = runs.on_samples(runs.groups), runs.on_samples(runs.owners)
    return list(zip(groups.tolist(), owners.tolist(), strict=True))


def are_longest(runs: Runs) -> bool:
    neighbours = list(zip(runs.groups.tolist(), runs.owners.tolist(), strict=True))
    return all(counts > 0 for counts in runs.counts.tolist()) and all(
        first != second for first, second in zip(neighbours, neighbours[1:], strict=False)
    )


@given(SAMPLES)
def test_runs_have_each_sample(samples: Samples) -> None:
    groups, owners = columns(samples)
    runs = Runs.of(groups, owners)
    assert samples_of(runs) == samples
    assert are_longest(runs)
    places = torch.arange(len(samples))
    assert torch.equal(runs.groups_of(places), groups)
    assert torch.equal(runs.owners_of(places), owners)
    for share in range(3):
        assert runs.places(share).tolist() == [place for place, (_, owner) in enumerate(samples) if owner == share]


@given(SAMPLES)
def test_prompts_in_order_are_one_run_each(samples: Samples) -> None:
    runs = Runs.of(*columns(samples))
    prompts = [prompt for prompt, _ in samples]
    shares = [{share for other, share in samples if other == prompt} for prompt in set(prompts)]
    assert runs.keep_groups == (prompts == sorted(prompts) and all(len(of_prompt) == 1 for of_prompt in shares))


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_runs_of_groups_equal_those_of_samples(number: int, size: int, data: st.DataObject) -> None:
    groups = [group for group in range(number) for _ in range(size)]
    of_groups = data.draw(st.lists(st.integers(-1, 2), min_size=number, max_size=number))
    of_samples = data.draw(st.lists(st.integers(-1, 2), min_size=len(groups), max_size=len(groups)))
    for owners in ([of_groups[group] for group in groups], of_samples):
        found = Runs.of_groups(torch.tensor(owners, dtype=torch.int32), size)
        assert found.owners.dtype == torch.int64
        assert samples_of(found) == list(zip(groups, owners, strict=True))
        assert are_longest(found)


@given(SAMPLES, st.data())
def test_new_owners_join_runs_that_become_equal(samples: Samples, data: st.DataObject) -> None:
    runs = Runs.of(*columns(samples))
    number = len(runs.counts)
    owners = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=number, max_size=number)), dtype=torch.int64)
    found = runs.owned_by(owners)
    expected = zip((prompt for prompt, _ in samples), runs.on_samples(owners).tolist(), strict=True)
    assert samples_of(found) == list(expected)
    assert are_longest(found)


@given(SAMPLES)
def test_sums_add_the_samples_of_each_run(samples: Samples) -> None:
    runs = Runs.of(*columns(samples))
    numbers = torch.arange(len(samples)) ** 2
    ends = runs.ends.tolist()
    expected = [sum(numbers[end - count : end].tolist()) for end, count in zip(ends, runs.counts.tolist(), strict=True)]
    assert runs.sums(numbers).tolist() == expected
