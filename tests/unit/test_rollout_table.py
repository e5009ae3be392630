"""Columns of samples, against the same samples as objects."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch import Generation, Group, Prompt, RemoteSample, Sample, float32, int32
from megarl.distributed.evenly import deal
from megarl.distributed.sharded import Shares
from megarl.rollout.open_groups import OpenGroups
from megarl.rollout.responses import of_groups
from megarl.rollout.table import GroupRows
from megarl.rollout.window import Window, Windows
from tests.support.windows import each_window

HERE, REPLICAS = 1, 3
SHARES = Shares(ranks=((0,), (1,), (2,)), rank=HERE)
COUNTS = st.integers(0, 9)


def prompt(row: int) -> Prompt:
    return Prompt(index=row, token_ids=[7] * (row % 5), text="", data_source="", ground_truth=None, extra_info={})


@st.composite
def samples(draw: Any, group: int, number: int, *, complete: bool = True) -> Sample:
    """Return a sample of this replica or of another, which may be without tokens."""
    length, flag = draw(COUNTS), draw(st.booleans())
    is_complete = complete or (draw(st.booleans()) and length > 0)
    ends = is_complete and flag
    tokens = int32([number] * length)
    own = Generation(group, tokens, float32([-1.0] * length), truncated=ends, sample=number, complete=is_complete)
    own = replace(own, weight_versions=int32([group] * length))
    replica = draw(st.integers(0, REPLICAS - 1))
    return own if replica == HERE else own.as_remote(replica)


@st.composite
def groups(draw: Any) -> list[Group]:
    number = draw(st.integers(1, 3))
    return [
        Group(prompt=prompt(row), samples=tuple(draw(samples(place, each)) for each in range(number)), started=row)
        for place, row in enumerate(draw(st.lists(COUNTS, min_size=1, max_size=6)))
    ]


@given(groups())
def test_columns_of_record_equal_its_samples(drawn: list[Group]) -> None:
    found = of_groups(drawn, SHARES)
    of_all = [(place, group.prompt, sample) for place, group in enumerate(drawn) for sample in group.samples]
    own = [sample for *_, sample in of_all if isinstance(sample, Generation)]
    index = found.index
    assert index.groups.tolist() == [place for place, *_ in of_all]
    assert index.owners.tolist() == [HERE if sample in own else sample.replica for *_, sample in of_all]
    assert index.num_tokens.tolist() == [sample.num_tokens for *_, sample in of_all]
    assert index.num_learnt.tolist() == [sample.num_learnt for *_, sample in of_all]
    assert index.lengths.tolist() == [len(prompt.token_ids) + sample.num_tokens for _, prompt, sample in of_all]
    assert index.truncated.tolist() == [sample.truncated for *_, sample in of_all]
    assert found.share.responses.tolist() == [token for sample in own for token in sample.token_ids]
    assert found.share.groups.tolist() == [sample.prompt for sample in own]
    assert found.mine.tolist() == [place for place, (*_, sample) in enumerate(of_all) if sample in own]


@given(groups(), st.data())
def test_groups_of_a_table_stay_the_same(drawn: list[Group], data: st.DataObject) -> None:
    whole = GroupRows.of(drawn)
    assert [*whole] == drawn
    chosen = data.draw(st.lists(st.sampled_from(range(len(drawn))), min_size=1))
    again = [whole[place] if data.draw(st.booleans()) else drawn[place] for place in chosen]
    assert [*GroupRows.of(again)] == [drawn[place] for place in chosen]


def test_new_groups_equal_new_group() -> None:
    prompts = [prompt(row) for row in range(3)]
    assert [*GroupRows.new(prompts, range(4, 7), started=5)] == [
        Group.new(each, range(4, 7), started=5) for each in prompts
    ]


def windows_of(finished: list[list[Sample]], waiting: list[list[int]]) -> Windows:
    """Return the windows of replicas, as that of `HERE` gets them."""
    told = [
        Window(done, num_steps=3, num_running=4, waiting=left) for done, left in zip(finished, waiting, strict=True)
    ]
    counts = torch.tensor([window.counts() for window in told])
    return Windows(counts=counts, content=torch.cat([each.content() for each in told]), mine=told[HERE], here=HERE)


@given(st.data())
def test_windows_reach_groups_as_objects_do(data: st.DataObject) -> None:
    """The twin replaces a sample in the tuple of its group."""
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    numbers = data.draw(st.permutations(range(len(counts) + 2)))[: len(counts)]
    least = data.draw(COUNTS)
    asked = [Group.new(prompt(row), range(least, least + count), started=row) for row, count in enumerate(counts)]
    cut = data.draw(st.integers(0, len(counts)))
    opened, twin = OpenGroups(), dict[int, Group]()
    for part in (slice(cut), slice(cut, None)):
        opened.add(np.array(numbers[part], dtype=np.int64), GroupRows.of(asked[part]))
    for number, group in zip(numbers, asked, strict=True):
        twin[number] = replace(group, samples=tuple(each.of_prompt(number) for each in group.samples))
    taken = list[int]()
    for _ in range(2):
        finished: list[list[Sample]] = [[] for _ in range(REPLICAS)]
        for number in twin:
            for place, known in enumerate(twin[number].samples):
                if known.complete or data.draw(st.booleans()):
                    continue
                sample = data.draw(samples(number, known.sample, complete=False))
                replica = sample.replica if isinstance(sample, RemoteSample) else HERE
                finished[replica].append(sample)
                parts = twin[number].samples
                twin[number] = replace(twin[number], samples=(*parts[:place], sample, *parts[place + 1 :]))
        waiting = data.draw(st.lists(st.lists(COUNTS, max_size=2), min_size=REPLICAS, max_size=REPLICAS))
        windows = windows_of(finished, waiting)
        assert windows.waiting == waiting
        assert [[*window.finished] for window in each_window(windows)] == finished
        opened.note(windows)
        complete = [number for number in twin if twin[number].is_complete and number not in taken]
        assert opened.take_complete() == complete
        taken += complete
        here = {number: any(isinstance(each, Generation) for each in twin[number].samples) for number in complete}
        assert {number: opened.is_here(number) for number in complete} == here
        assert {number: opened.group(number) for number in twin} == twin
        open_samples = {number: sum(not each.complete for each in group.samples) for number, group in twin.items()}
        assert {number: opened.num_left(number) for number in twin} == open_samples
        assert opened.num_open == len(twin) - len(taken)
    assert [*opened.everything()] == [*twin.values()]
    assert opened.take_all() == [number for number in twin if number not in taken]


@given(st.lists(COUNTS, min_size=1, max_size=6), st.lists(COUNTS, max_size=600))
def test_each_item_goes_to_the_least_loaded(loads: list[int], sizes: list[int]) -> None:
    expected, now = [], list(loads)
    for size in sizes:
        expected.append(now.index(min(now)))
        now[expected[-1]] += size
    assert deal(np.array(loads), np.array(sizes, dtype=np.int64)).tolist() == expected


def unfinished(sample: Sample) -> Sample:
    if isinstance(sample, Generation):
        return replace(sample, complete=False)
    return sample._replace(complete=False)


@given(groups())
def test_replica_and_open_samples_of_groups(drawn: list[Group]) -> None:
    begun = [replace(group, samples=tuple(map(unfinished, group.samples))) for group in drawn]
    found = GroupRows.of(begun)
    assert found.num_incomplete().tolist() == [len(group.samples) for group in begun]
    homes = [
        next((HERE if isinstance(each, Generation) else each.replica for each in group.samples if each.num_tokens), -1)
        for group in begun
    ]
    assert found.replicas(HERE).tolist() == homes
    assert found.ends.tolist() == list(accumulate(len(group.samples) for group in begun))
