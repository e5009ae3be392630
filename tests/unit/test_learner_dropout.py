"""Dropout by a hash: the numbers that it drops, and their keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.learner.dropout import TokenDropout, is_dropped, mixed, token_keys

WORD = 1 << 32


def mixed_in_python(number: int) -> int:
    bits = number % WORD
    bits = (bits ^ bits >> 16) * 0x7FEB352D % WORD
    bits = (bits ^ bits >> 15) * 0x846CA68B % WORD
    bits ^= bits >> 16
    return bits - WORD if bits >= WORD // 2 else bits


def dropout(*, columns: slice = slice(None), tp_rank: int = 0, layer: str = "layer") -> TokenDropout:
    made = TokenDropout(0.3, layer, torch.arange(8, dtype=torch.int32)[columns], tp_rank=tp_rank, tp_size=2)
    made.begin("0.1")
    return made


def dropped(by: TokenDropout, hidden: Tensor, keys: Tensor | None, *, is_training: bool = True) -> Tensor:
    with by.keys.set_to(keys):
        return by(hidden, is_training=is_training)


KEYS = token_keys(torch.arange(6), torch.tensor([2, 4]))


@given(st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1))
def test_the_hash_is_that_of_big_integers(numbers: list[int]) -> None:
    assert mixed(torch.tensor(numbers)).tolist() == [mixed_in_python(number) for number in numbers]


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_numbers_are_dropped_at_the_rate(rate: float) -> None:
    keys = token_keys(torch.arange(2000) % 50, torch.tensor([500, 700, 800]))
    drops = is_dropped(keys, mixed(torch.arange(1000)), rate).float()
    spread = (rate * (1 - rate)) ** 0.5
    assert drops.mean().item() == pytest.approx(rate, abs=5 * spread / 2_000_000**0.5)
    assert drops.mean(0).std().item() == pytest.approx(spread / 2000**0.5, rel=0.1)  # as independent draws have it
    assert drops.mean(1).std().item() == pytest.approx(spread / 1000**0.5, rel=0.1)


def test_the_last_rates_drop_all_or_nothing() -> None:
    columns = torch.arange(8, dtype=torch.int32)
    assert is_dropped(KEYS, columns, 1.0 - 1e-12).all()
    assert not is_dropped(KEYS, columns, 1e-12).any()


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_keys_follow_from_the_sample_alone(samples: list[list[int]]) -> None:
    def keys_of(samples: list[list[int]]) -> Tensor:
        return token_keys(torch.tensor(sum(samples, [])), torch.tensor([len(sample) for sample in samples]))

    alone = torch.cat([keys_of([sample]) for sample in samples])
    assert torch.equal(keys_of(samples), alone)
    assert len(alone.unique()) >= len({tuple(sample) for sample in samples})


def test_other_samples_and_places_have_other_keys() -> None:
    keys = token_keys(torch.tensor([7, 7, 7, 7, 7, 8]), torch.tensor([3, 3]))
    assert len(keys.unique()) == 6


def test_ranks_drop_their_parts_of_whole() -> None:
    hidden = torch.randn(6, 1, 8)
    whole = dropped(dropout(), hidden, KEYS)
    for columns in (slice(0, 4), slice(4, 8)):
        assert torch.equal(dropped(dropout(columns=columns), hidden[..., columns], KEYS), whole[..., columns])
    for tp_rank, tokens in enumerate((slice(0, 3), slice(3, 6))):  # sequence parallelism
        assert torch.equal(dropped(dropout(tp_rank=tp_rank), hidden[tokens], KEYS), whole[tokens])


def test_what_stays_is_enlarged() -> None:
    hidden = torch.randn(6, 1, 8)
    found = dropped(dropout(), hidden, KEYS)
    is_zero = found == 0
    assert 0 < is_zero.sum() < is_zero.numel()
    torch.testing.assert_close(found[~is_zero], hidden[~is_zero] / 0.7)


def test_layers_and_passes_draw_anew() -> None:
    hidden = torch.ones(6, 1, 8)
    found = [dropped(dropout(), hidden, KEYS), dropped(dropout(layer="other"), hidden, KEYS)]
    later = dropout()
    later.begin("0.2")
    found.append(dropped(later, hidden, KEYS))
    assert len({tuple(each.flatten().tolist()) for each in found}) == 3


def test_nothing_is_dropped_outside_of_training() -> None:
    hidden = torch.randn(6, 1, 8)
    assert dropped(dropout(), hidden, KEYS, is_training=False) is hidden
    assert dropped(dropout(), hidden, None) is hidden


def test_a_pass_computed_again_drops_the_same() -> None:
    by, hidden = dropout(), torch.randn(6, 1, 8)
    other = token_keys(torch.arange(6) + 9, torch.tensor([6]))
    first = []
    for keys in (KEYS, other):
        with torch.no_grad():  # as within a checkpoint of activations
            first.append(dropped(by, hidden, keys))
    again = [by(hidden, is_training=True) for _ in first]
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first)
