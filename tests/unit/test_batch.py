"""Records put together and taken apart: every field follows its samples, and every number its token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megarl.batch import Generation, Prompt, PromptList, Rollouts, float32, int32
from megarl.distributed.sharded import join, merge
from megarl.learner.per_data_source import PerDataSource
from megarl.rollout.responses import as_rollouts
from tests.support.records import answer, in_rows, of_rows, prompts

COLUMNS = ["responses", "mask", "rollout_log_probs", "weight_versions", "places", "turn_rewards"]


def episodes(lengths: Sequence[int], *, seed: int = 0) -> Rollouts:
    """Return episodes of these lengths to three prompts, with other numbers in all places of all columns."""
    generator = torch.Generator().manual_seed(seed)
    size, total = len(lengths), sum(lengths)
    return Rollouts(
        prompts=prompts([2, 1, 3]).prompts,
        groups=torch.randint(3, (size,), generator=generator).sort().values,
        num_tokens=torch.tensor(lengths, dtype=torch.int64),
        responses=torch.randperm(total, generator=generator, dtype=torch.int32),
        mask=torch.rand(total, generator=generator) < 0.7,
        rollout_log_probs=torch.randn(total, generator=generator).mul(20).exp(),  # their sums round
        truncated=torch.rand(size, generator=generator) < 0.5,
        weight_versions=torch.arange(total, dtype=torch.int32),
        read_lengths=torch.arange(size) % 3 + 1,
        sequences=torch.randperm(int((torch.arange(size) % 3 + 1).sum()), generator=generator, dtype=torch.int32),
        places=torch.randperm(total, generator=generator),
        turn_rewards=torch.randn(total, generator=generator),
        num_turns=torch.arange(size),
        stop_reasons=[f"reason {sample}" for sample in range(size)],
        faults=[f"fault {sample}" for sample in range(size)],
    )


RECORDS = st.builds(episodes, st.lists(st.integers(0, 4), max_size=6), seed=st.integers(0, 99))
NOTHING, EMPTY = episodes([]), episodes([0, 0])


def by_sample(record: Rollouts, column: Tensor | None) -> list[list[Any]]:
    """Return the numbers of each sample in a column."""
    assert column is not None
    numbers = iter(column.tolist())
    found = [[next(numbers) for _ in range(length)] for length in record.num_tokens.tolist()]
    assert not [*numbers]
    return found


def samples_of(record: Rollouts) -> list[tuple[Any, ...]]:
    """Return all that the record has of each sample."""
    columns = [by_sample(record, getattr(record, name)) for name in COLUMNS]
    numbers = [numbers.tolist() for numbers in (record.truncated, record.num_turns)]  # type: ignore[union-attr]
    asked = [record.prompt_of(sample) for sample in range(len(record))]
    read = [part.tolist() for part in record.tokens().split(record.lengths().tolist())]
    return [*zip(asked, *columns, *numbers, read, record.stop_reasons, record.faults, strict=True)]


def test_every_column_is_compared() -> None:
    assert [name for name, _ in episodes([1]).columns()] == COLUMNS


@given(RECORDS)
@example(NOTHING)
@example(EMPTY)
def test_rows_pad_responses_and_become_flat_again(record: Rollouts) -> None:
    longest = max(record.num_tokens.tolist(), default=0)
    for _, column in record.columns():
        rows = record.rows(column)
        assert rows.dtype == column.dtype
        assert rows.shape == (len(record), longest)
        assert rows.tolist() == [each + [0] * (longest - len(each)) for each in by_sample(record, column)]
        assert torch.equal(record.flat(rows), column)
        assert torch.equal(record.flat(rows + 1), column + 1)  # whatever is behind the responses


@given(RECORDS)
def test_record_of_its_rows_is_the_record(record: Rollouts) -> None:
    rows = in_rows(record)
    present = record.rows(torch.ones_like(record.mask))
    values = {name: getattr(record, name) for name in ("prompts", "groups", "truncated", "num_turns")}
    values |= {name: getattr(record, name) for name in ("read_lengths", "sequences", "stop_reasons", "faults")}
    again = of_rows(Rollouts, observed=present & ~rows["mask"], **rows, **values)
    assert samples_of(again) == samples_of(record)


@given(RECORDS, st.data())
@example(NOTHING, None)
@example(EMPTY, None)
def test_selected_samples_keep_all_that_they_had(record: Rollouts, data: st.DataObject | None) -> None:
    numbers = st.lists(st.integers(0, len(record) - 1), max_size=8) if len(record) else st.just([])
    chosen = data.draw(numbers) if data else []
    found, all_samples = record.select(torch.tensor(chosen, dtype=torch.int64)), samples_of(record)
    assert samples_of(found) == [all_samples[sample] for sample in chosen]
    assert [found.response_ids(place).tolist() for place in range(len(chosen))] == [
        record.response_ids(sample).tolist() for sample in chosen
    ]
    for (name, column), (_, whole) in zip(found.columns(), record.columns(), strict=True):
        assert column.dtype == whole.dtype
        assert column.tolist() == [number for sample in chosen for number in by_sample(record, whole)[sample]], name


@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_joined_records_have_all_samples(parts: list[Rollouts]) -> None:
    both = join(parts)
    assert samples_of(both) == sum(map(samples_of, parts), [])
    assert len(both.prompts) == 3 * len(parts)


@given(RECORDS, st.integers(0, 2**6 - 1))
@example(NOTHING, 0)
def test_samples_without_responses_keep_everything_else(record: Rollouts, bits: int) -> None:
    removed = [bool(bits >> sample & 1) for sample in range(len(record))]
    found = record.without_responses(torch.tensor(removed, dtype=torch.bool))
    first, last = 1, 1 + len(COLUMNS)
    expected = [
        (*each[:first], *(([],) * len(COLUMNS) if gone else each[first:last]), *each[last:])
        for each, gone in zip(samples_of(record), removed, strict=True)
    ]
    assert samples_of(found) == expected
    assert found.groups.tolist() == record.groups.tolist()


@given(st.builds(episodes, st.lists(st.integers(0, 40), max_size=6)), st.data())
def test_sums_of_sample_do_not_depend_on_others(record: Rollouts, data: st.DataObject) -> None:
    column = record.rollout_log_probs
    assert column is not None
    sums = record.sums(column)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([sum(numbers) for numbers in by_sample(record, column)], rel=1e-13)
    assert record.num_learnt().tolist() == [sum(said) for said in by_sample(record, record.mask)]
    chosen = torch.tensor(data.draw(st.permutations(range(len(record)))), dtype=torch.int64)[:3]
    assert torch.equal(record.select(chosen).sums(record.tokens_of(chosen, column)), sums[chosen])  # every bit


@given(RECORDS)
@example(NOTHING)
@example(EMPTY)
def test_laid_out_record_has_rows_and_keeps_gradient(record: Rollouts) -> None:
    laid_out = record.laid_out(lambda rows: rows)
    for (_, rows), (_, column) in zip(laid_out.columns(), record.columns(), strict=True):
        assert torch.equal(rows, record.rows(column))
        assert laid_out.rows(rows) is rows
    column = torch.ones(len(record.mask), requires_grad=True)
    factors = torch.rand(record.rows(record.mask).shape)
    (record.rows(column) * factors).sum().backward()
    assert column.grad is not None
    assert torch.equal(column.grad, record.flat(factors))


def test_columns_move_and_lengths_stay() -> None:
    record = episodes([2, 0, 3]).laid_out(lambda rows: rows.to("meta"))
    assert all(column.is_meta for _, column in record.columns())
    assert record.rows(record.mask).shape == (3, 3)
    assert record.num_tokens.tolist() == [2, 0, 3]
    assert record.groups.device == record.truncated.device == torch.device("cpu")


def test_joined_records_keep_samples_in_order() -> None:
    first, second = answer(prompts([4, 6]), [1, 2, 1, 1]), answer(prompts([3]), [3, 1])
    both = join([first, second])
    assert [len(prompt.token_ids) for prompt in both.prompts] == [4, 6, 3]
    assert both.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.num_tokens.tolist() == both.num_learnt().tolist() == [1, 2, 1, 1, 3, 1]
    assert [both.response_ids(sample).tolist() for sample in (1, 4)] == [[20, 21], [10, 11, 12]]
    assert both.rollout_log_probs is not None
    assert torch.equal(both.rollout_log_probs, -1.0 * both.mask)
    assert both.lengths().tolist() == [5, 6, 7, 7, 6, 4]


def test_record_of_selected_prompts_renumbers_their_samples() -> None:
    some = answer(prompts([4, 6, 3]), [1, 2, 1, 1, 3, 1]).of_prompts([0, 2])
    assert [prompt.index for prompt in some.prompts] == [0, 2]
    assert some.groups.tolist() == [0, 0, 1, 1]
    assert [some.response_ids(sample).tolist() for sample in range(4)] == [[10], [20, 21], [50, 51, 52], [60]]
    assert len(some.of_prompts([])) == 0


def generation(prompt: int, log_probs: list[float] | None) -> Generation:
    numbers = None if log_probs is None else float32(log_probs)
    return Generation(prompt=prompt, token_ids=int32([7]) * (prompt + 1), log_probs=numbers, truncated=False)


def test_unrequested_log_probs_are_none() -> None:
    def record(*log_probs: list[float] | None) -> Rollouts:
        return as_rollouts(
            prompts([1, 1]), [0, 1], [generation(place, told) for place, told in enumerate(log_probs)], n=1
        )

    assert record(None, None).rollout_log_probs is None
    told = record([-1.0], [-2.0, -3.0])
    assert told.rollout_log_probs is not None
    assert told.rows(told.rollout_log_probs).tolist() == [[-1.0, 0.0], [-2.0, -3.0]]


def test_a_prompt_without_all_its_samples_is_named() -> None:
    responses = [generation(0, None), generation(0, None), generation(1, None)]
    with pytest.raises(RuntimeError, match=r"asked for 2 samples of each prompt, and 2 .*: row 1 has 1, row 2 has 0"):
        as_rollouts(prompts([1, 1, 1]), [0, 0, 1], responses, n=2)


@given(st.data())
def test_sample_tokens_are_prompt_then_response(data: st.DataObject) -> None:
    batch = answer(prompts(data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))), [2, 0, 3, 1, 4, 2])
    chosen = data.draw(st.lists(st.integers(0, 5), max_size=8))
    expected = [[*batch.prompt_of(sample).token_ids, *batch.response_ids(sample).tolist()] for sample in chosen]
    found = batch.select(torch.tensor(chosen, dtype=torch.int64))
    assert found.tokens().tolist() == sum(expected, [])
    assert found.lengths().tolist() == batch.lengths()[chosen].tolist() == [len(tokens) for tokens in expected]
    predicted = [[place + 1 for place in places] for places in by_sample(found, found.predictors())]
    assert predicted == [
        [*range(len(batch.prompt_of(sample).token_ids), len(tokens))]
        for sample, tokens in zip(chosen, expected, strict=True)
    ]


def routed(lengths: Sequence[int]) -> Rollouts:
    """Return responses of these lengths to three prompts, with routes that name the sample and the place."""
    record = answer(prompts([2, 1, 3]), lengths)
    places = [
        [[[sample, place]] for place in range(count)] for sample, count in enumerate(record.num_places().tolist())
    ]
    return replace(record, routes=torch.tensor([row for rows in places for row in rows], dtype=torch.int16))


def expected_routes(samples: Sequence[int], counts: Tensor) -> list[list[list[int]]]:
    return [[[sample, place]] for sample, count in zip(samples, counts.tolist(), strict=True) for place in range(count)]


def routes_in(record: Rollouts) -> list[list[list[int]]]:
    assert record.routes is not None
    found: list[list[list[int]]] = record.routes.tolist()
    return found


@given(
    lengths=st.lists(st.integers(0, 4), min_size=6, max_size=6), order=st.permutations(range(6)), cut=st.integers(0, 6)
)
def test_routes_follow_their_samples(lengths: list[int], order: list[int], cut: int) -> None:
    record = routed(lengths)
    chosen = order[:cut]
    selected = record.select(torch.tensor(chosen, dtype=torch.int64))
    assert routes_in(selected) == expected_routes(chosen, selected.num_places())
    parts = [record.select(torch.tensor(sorted(part), dtype=torch.int64)) for part in (order[:cut], order[cut:])]
    places = torch.tensor([*sorted(order[:cut]), *sorted(order[cut:])])
    assert routes_in(merge(parts, places.argsort())) == routes_in(record)
    joined = join(parts)
    assert routes_in(joined) == expected_routes(places.tolist(), joined.num_places())
    removed = torch.tensor([sample in chosen for sample in range(6)])
    left = record.without_responses(removed)
    assert routes_in(left) == expected_routes(range(6), left.num_places())
    assert record.laid_out(torch.clone).routes is None


def unread(*sources: str) -> PromptList:
    """Return prompts of two tokens each, which nobody may read."""

    def read(place: int) -> Prompt:
        raise AssertionError(f"prompt {place} was read")

    return PromptList.read_by(read, torch.full((len(sources),), 2), sources.__getitem__)


def test_joined_prompts_are_not_read() -> None:
    [known] = prompts([3]).prompts
    joined = PromptList.joined(
        [unread("a", "b"), PromptList([replace(known, data_source="c", made_by=1)]), unread("d")]
    )
    assert joined.lengths.tolist() == [2, 2, 3, 2]
    assert [*map(joined.source, range(4))] == ["a", "b", "c", "d"]
    assert joined.makers == {2: 1}
    assert joined[2].token_ids == known.token_ids
    with pytest.raises(AssertionError, match="prompt 0 was read"):
        joined.make_item(3)


def test_data_sources_need_no_reading_of_prompts() -> None:
    record = replace(answer(prompts([1, 1, 1]), [1] * 6), prompts=unread("math", "code", "math"))
    readers = PerDataSource(named={"math": 1}, other=0)
    assert [(reader, samples.tolist()) for reader, samples in readers.shares(record)] == [
        (0, [2, 3]),
        (1, [0, 1, 4, 5]),
    ]
