import torch

from megarl.learner.packed import Packed, pack_samples
from tests.records import answer, prompts

CPU = torch.device("cpu")
# Prompts 100 101 and 200 201 202; responses 10 11 | 20 | 30 31 32 | 40 41, two to each prompt.
BATCH = answer(prompts([2, 3]), [2, 1, 3, 2])


def bounds(packed: Packed) -> list[int]:
    assert torch.equal(packed.sequences.cu_seqlens_q, packed.sequences.cu_seqlens_kv)
    return packed.sequences.cu_seqlens_q.tolist()


def test_sequences_lie_end_to_end_without_their_last_tokens() -> None:
    packed = pack_samples(BATCH, [2, 0], multiple_of=1, device=CPU)
    assert packed.samples.tolist() == [2, 0]
    assert packed.tokens.tolist() == [[200, 201, 202, 30, 31, 100, 101, 10]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert bounds(packed) == [0, 5, 8]
    assert packed.sequences.max_seqlen_q == 5
    # each response token is predicted at the place before it
    assert packed.predictors.tolist() == [2, 3, 4, 6, 7]
    assert packed.targets.tolist() == [30, 31, 32, 10, 11]


def test_numbers_of_tokens_come_back_to_their_samples() -> None:
    packed = pack_samples(BATCH, [2, 0], multiple_of=1, device=CPU)
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    table = packed.unpack(numbers)
    assert table.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]
    table[1].sum().backward()
    assert numbers.grad is not None
    assert numbers.grad.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_row_is_filled_up_with_a_sequence_that_nobody_reads() -> None:
    packed = pack_samples(BATCH, [1, 3], multiple_of=4, device=CPU)
    assert packed.tokens.tolist() == [[100, 101, 200, 201, 202, 40, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert bounds(packed) == [0, 2, 6, 8]
    assert packed.predictors.tolist() == [1, 4, 5]
    assert packed.targets.tolist() == [20, 40, 41]


def test_a_rank_without_samples_still_has_a_row() -> None:
    packed = pack_samples(BATCH, [], multiple_of=2, device=CPU)
    assert packed.tokens.tolist() == [[0, 0]]
    assert bounds(packed) == [0, 2]
    assert packed.predictors.numel() == packed.targets.numel() == 0
    assert packed.unpack(torch.empty(0)).shape == (0, 3)
