from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch import Rollouts
from megarl.training.minibatches import MiniBatches
from tests.support.records import answer, prompts


def samples(batches: Iterator[Rollouts]) -> list[list[int]]:
    """The samples of each mini-batch, by the only token of their responses."""
    return [(batch.responses // 10 - 1).tolist() for batch in batches]


def minibatches(record: Rollouts, **settings: Any) -> Iterator[Rollouts]:
    cut = MiniBatches(**settings).members(record.groups, len(record.prompts), step=0)
    return (record.select(chosen) for chosen in cut)


def batch(num_prompts: int, n: int) -> Rollouts:
    return answer(prompts([1] * num_prompts), [1] * (num_prompts * n))


def test_in_file_order_without_shuffling() -> None:
    cut = samples(minibatches(batch(3, 2), num_prompts=2, num_epochs=2, shuffle=False, seed=1))
    assert cut == [[0, 1, 2, 3], [4, 5]] * 2


@given(
    num_prompts=st.integers(1, 9),
    n=st.integers(1, 3),
    size=st.integers(1, 9),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
)
def test_epoch_has_every_prompt_once_with_all_samples(
    num_prompts: int, n: int, size: int, num_epochs: int, seed: int
) -> None:
    cut = samples(minibatches(batch(num_prompts, n), num_prompts=size, num_epochs=num_epochs, shuffle=True, seed=seed))
    per_epoch = -(-num_prompts // size)
    assert len(cut) == num_epochs * per_epoch
    for epoch in range(num_epochs):
        part = cut[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(sample for found in part for sample in found) == list(range(num_prompts * n))
        assert [len(found) for found in part[:-1]] == [size * n] * (per_epoch - 1)
        for found in part:
            groups = {sample // n for sample in found}
            assert len(found) == len(groups) * n


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int) -> list[list[int]]:
        return samples(minibatches(batch(40, 1), num_prompts=40 // 8, num_epochs=2, shuffle=True, seed=seed))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:8] != order(1)[8:]


def test_records_keep_their_rows_together() -> None:
    whole = answer(prompts([2, 3, 4]), [1, 2, 3])
    for cut in minibatches(whole, num_prompts=1, num_epochs=1, shuffle=True, seed=5):
        group = int(cut.groups[0])
        assert cut.mask.sum() == group + 1
        assert cut.lengths().tolist() == [(group + 2) + (group + 1)]
        assert cut.prompt_of(0).index == group


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(minibatches(batch(4, 1), num_prompts=2, num_epochs=1, shuffle=True, seed=7))
    assert torch.equal(torch.get_rng_state(), before)
