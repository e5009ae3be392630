"""A micro-batch as one row of tokens: places, padding, predictors, and the shares of context-parallel ranks."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.learner.packed import Packed, pack_samples, places_of
from tests.support.records import answer, prompts

CPU = torch.device("cpu")
# Prompts 100 101 and 200 201 202; responses 10 11 | 20 | 30 31 32 | 40 41, two to each prompt.
BATCH = answer(prompts([2, 3]), [2, 1, 3, 2])


def bounds(packed: Packed) -> list[int]:
    assert torch.equal(packed.sequences.cu_seqlens_q, packed.sequences.cu_seqlens_kv)
    return packed.sequences.cu_seqlens_q.tolist()


def test_sequences_are_concatenated_without_their_last_tokens() -> None:
    packed = pack_samples(BATCH, [2, 0], num_parts=1, device=CPU)
    assert packed.samples.tolist() == [2, 0]
    assert packed.tokens.tolist() == [[200, 201, 202, 30, 31, 100, 101, 10]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert bounds(packed) == [0, 5, 8]
    assert packed.sequences.max_seqlen_q == 5
    # the place before a response token predicts it
    assert packed.predictors.tolist() == [2, 3, 4, 6, 7]
    assert packed.targets.tolist() == [30, 31, 32, 10, 11]
    assert packed.padding_mask is None


def test_numbers_of_tokens_come_back_to_their_samples() -> None:
    packed = pack_samples(BATCH, [2, 0], num_parts=1, device=CPU)
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    table = packed.unpack(numbers)
    assert table.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]
    table[1].sum().backward()
    assert numbers.grad is not None
    assert numbers.grad.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_tokens_of_environment_are_read_and_not_predicted() -> None:
    packed = pack_samples(replace(BATCH, mask=BATCH.responses != 31), [2, 0], num_parts=1, device=CPU)
    assert packed.tokens.tolist() == [[200, 201, 202, 30, 31, 100, 101, 10]]
    assert packed.predictors.tolist() == [2, 4, 6, 7]
    assert packed.targets.tolist() == [30, 32, 10, 11]
    assert packed.unpack(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]


def test_a_sequence_that_nothing_reads_pads_a_row() -> None:
    packed = pack_samples(BATCH, [1, 3], num_parts=4, device=CPU)
    assert packed.tokens.tolist() == [[100, 101, 200, 201, 202, 40, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert bounds(packed) == [0, 2, 6, 8]
    assert packed.padding_mask is not None
    assert packed.padding_mask.tolist() == [[False] * 6 + [True] * 2]
    assert packed.predictors.tolist() == [1, 4, 5]
    assert packed.targets.tolist() == [20, 40, 41]


def test_a_rank_without_samples_still_has_a_row() -> None:
    packed = pack_samples(BATCH, [], num_parts=2, device=CPU)
    assert packed.tokens.tolist() == [[0, 0]]
    assert bounds(packed) == [0, 2]
    assert packed.predictors.numel() == packed.targets.numel() == 0
    assert packed.unpack(torch.empty(0)).shape == (0, 0)


def test_a_sequence_is_dealt_out_from_both_ends() -> None:
    # 200 201 202 30 31 and 100 101 10, each padded to a multiple of 4: pieces of two tokens and of one token.
    first, second = (pack_samples(BATCH, [2, 0], device=CPU, cp_rank=rank, cp_size=2) for rank in range(2))
    assert bounds(first) == bounds(second) == [0, 8, 12]
    assert first.sequences.max_seqlen_q == 8
    assert first.tokens.tolist() == [[200, 201, 0, 0, 100, 0]]
    assert first.positions.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert second.tokens.tolist() == [[202, 30, 31, 0, 101, 10]]
    assert second.positions.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert first.padding_mask is not None
    assert first.padding_mask.tolist() == [[False, False, True, True, False, True]]
    # 202 30 31 predict 30 31 32, and 101 10 predict 10 11: all on the second rank
    assert first.predictors.numel() == first.targets.numel() == 0
    assert second.predictors.tolist() == [0, 1, 2, 4, 5]
    assert second.targets.tolist() == [30, 31, 32, 10, 11]


def test_context_parallel_ranks_complete_tables_together() -> None:
    parts = [pack_samples(BATCH, [3, 0, 2], device=CPU, num_parts=4, cp_rank=rank, cp_size=4) for rank in range(4)]
    # 3 sequences of 8 tokens, and 8 zeros: four ranks with four parts of two tokens
    assert {part.tokens.shape[1] for part in parts} == {8}
    responses = sum(part.unpack(part.targets.float()) for part in parts)
    assert torch.is_tensor(responses)
    assert responses.tolist() == [[40.0, 41.0, 0.0], [10.0, 11.0, 0.0], [30.0, 31.0, 32.0]]


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), cp_size=st.integers(1, 4))
def test_places_are_those_of_cutting_every_sequence(lengths: list[int], cp_size: int) -> None:
    pieces = 2 * cp_size if cp_size > 1 else 1
    whole = torch.tensor(lengths) * pieces
    row = torch.arange(int(whole.sum())).split(whole.tolist())
    for rank in range(cp_size):
        cuts = [sequence.chunk(pieces) for sequence in row]
        numbers = [rank, pieces - 1 - rank] if cp_size > 1 else [0]
        expected = torch.cat([cut[number] for cut in cuts for number in numbers])
        places, positions = places_of(whole, rank, cp_size)
        assert torch.equal(places, expected)
        assert torch.equal(positions, torch.cat([torch.arange(int(length)) for length in whole])[places])


def test_a_sample_without_a_response_has_no_predictors() -> None:
    batch = BATCH.without_responses(torch.tensor([True, False, True, False]))
    packed = pack_samples(batch, [0, 1], device=CPU)
    assert packed.tokens.tolist() == [[100, 100, 101]]
    assert packed.predictors.tolist() == [2]
    assert packed.targets.tolist() == [20]
    assert packed.unpack(torch.tensor([5.0])).tolist() == [[0.0], [5.0]]


def test_single_token_prompts_still_make_row() -> None:
    batch = answer(prompts([1, 1]), [2, 1]).without_responses(torch.tensor([True, True]))
    packed = pack_samples(batch, [0, 1], device=CPU, num_parts=2)
    assert packed.tokens.tolist() == [[0, 0]]
    assert packed.predictors.numel() == packed.targets.numel() == 0
