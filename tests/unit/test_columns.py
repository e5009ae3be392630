"""Slices of rows of samples against the rows of each sample, one by one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.columns import spans, spans_of_choices, spans_of_parts

COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def rows_of(samples: list[int], counts: list[int]) -> list[int]:
    return [sum(counts[:sample]) + row for sample in samples for row in range(counts[sample])]


def rows_in(found: list[slice]) -> list[int]:
    return [row for span in found for row in range(span.start, span.stop)]


@given(COUNTS, st.data())
def test_slices_have_the_rows_of_chosen_samples(counts: list[int], data: st.DataObject) -> None:
    choice = st.lists(st.integers(0, len(counts) - 1))
    choices = data.draw(st.lists(choice, min_size=1, max_size=4))
    found = spans_of_choices([torch.tensor(each, dtype=torch.int64) for each in choices], torch.tensor(counts))
    assert [rows_in(each) for each in found] == [rows_of(each, counts) for each in choices]
    assert found[0] == spans(torch.tensor(choices[0], dtype=torch.int64), torch.tensor(counts))


@given(COUNTS, st.data())
def test_slices_of_parts_have_their_rows(counts: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(counts)), max_size=3)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, len(counts)], strict=True)]
    samples = data.draw(st.permutations(range(len(counts))))
    columns = torch.arange(sum(counts)).split(
        [len(rows_of([*range(end - size, end)], counts)) for size, end in zip(sizes, [*cuts, len(counts)], strict=True)]
    )
    found = spans_of_parts(torch.tensor(samples), torch.tensor(counts), sizes)
    assert torch.cat([columns[part][span] for part, span in found]).tolist() == rows_of([*samples], counts)


def test_neighbours_share_a_slice() -> None:
    assert spans(torch.tensor([1, 2, 0]), torch.tensor([2, 1, 3])) == [slice(2, 6), slice(0, 2)]
