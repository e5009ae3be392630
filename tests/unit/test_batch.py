"""Records put together and taken apart: every field follows its samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch import Generation, Rollouts, join
from megarl.rollout.responses import as_rollouts
from tests.support.records import answer, prompts


def test_joined_records_keep_samples_in_order() -> None:
    first, second = answer(prompts([4, 6]), [1, 2, 1, 1]), answer(prompts([3]), [3, 1])
    both = join([first, second])
    assert [len(prompt.token_ids) for prompt in both.prompts] == [4, 6, 3]
    assert both.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.mask.sum(-1).tolist() == [1, 2, 1, 1, 3, 1]
    assert [both.response_ids(sample) for sample in (1, 4)] == [[20, 21], [10, 11, 12]]
    assert both.rollout_log_probs is not None
    assert torch.equal(both.rollout_log_probs, -1.0 * both.mask)
    assert both.lengths().tolist() == [5, 6, 7, 7, 6, 4]


def test_record_of_selected_prompts_renumbers_their_samples() -> None:
    some = answer(prompts([4, 6, 3]), [1, 2, 1, 1, 3, 1]).of_prompts([0, 2])
    assert [prompt.index for prompt in some.prompts] == [0, 2]
    assert some.groups.tolist() == [0, 0, 1, 1]
    assert [some.response_ids(sample) for sample in range(4)] == [[10], [20, 21], [50, 51, 52], [60]]
    assert len(some.of_prompts([])) == 0


def generation(prompt: int, log_probs: list[float] | None) -> Generation:
    return Generation(prompt=prompt, token_ids=[7] * (prompt + 1), log_probs=log_probs, truncated=False)


def test_unrequested_log_probs_are_none() -> None:
    def record(*log_probs: list[float] | None) -> Rollouts:
        return as_rollouts(
            prompts([1, 1]), [0, 1], [generation(place, told) for place, told in enumerate(log_probs)], n=1
        )

    assert record(None, None).rollout_log_probs is None
    told = record([-1.0], [-2.0, -3.0]).rollout_log_probs
    assert told is not None
    assert told.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]


def test_a_prompt_without_all_its_samples_is_named() -> None:
    responses = [generation(0, None), generation(0, None), generation(1, None)]
    with pytest.raises(RuntimeError, match=r"asked for 2 samples of each prompt, and 2 .*: row 1 has 1, row 2 has 0"):
        as_rollouts(prompts([1, 1, 1]), [0, 0, 1], responses, n=2)


@given(st.data())
def test_sample_tokens_are_prompt_then_response(data: st.DataObject) -> None:
    batch = answer(prompts(data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))), [2, 0, 3, 1, 4, 2])
    chosen = data.draw(st.lists(st.integers(0, 5), max_size=8))
    expected = [[*batch.prompt_of(sample).token_ids, *batch.response_ids(sample)] for sample in chosen]
    assert batch.tokens(torch.tensor(chosen, dtype=torch.int64)).tolist() == sum(expected, [])
    assert batch.lengths()[chosen].tolist() == [len(tokens) for tokens in expected]
