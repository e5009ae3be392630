"""The checksum of a box: hand-worked, blind to how the box lies in memory, and to nothing that changes it."""

import pytest
import torch

from megarl.reshard import checksums
from megarl.reshard.checksums import checksum


def test_words_are_weighted_by_odd_numbers():
    assert checksum(torch.tensor([5, 7, 1], dtype=torch.uint8), torch.uint8).item() == 1 * 5 + 3 * 7 + 5 * 1
    one = 0x3F800000  # 1.0 in float32
    assert checksum(torch.ones(2, 2), torch.float32).item() == (1 + 3 + 5 + 7) * one
    assert checksum(torch.tensor(1.0), torch.float32).item() == one
    assert checksum(torch.tensor(-0.0, dtype=torch.bfloat16), torch.bfloat16).item() == -(1 << 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_depends_on_the_values_alone(dtype, monkeypatch):
    values = torch.randn(24, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = checksum(values, dtype).item()
    assert checksum(values.T.contiguous().T, dtype).item() == expected
    assert checksum(values.double(), dtype).item() == expected
    monkeypatch.setattr(checksums, "BLOCK", 50)
    assert checksum(values, dtype).item() == expected
    assert checksum(values.flatten(), dtype).item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_detects_every_flipped_bit_and_exchange(dtype):
    values = torch.randn(12, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = values.view(checksums.WORDS[dtype.itemsize])
    seen = [checksum(values, dtype).item()]
    for position in range(len(words)):
        for bit in range(8 * dtype.itemsize - 1):
            words[position] ^= 1 << bit
            seen.append(checksum(values, dtype).item())
            words[position] ^= 1 << bit
    for one in range(len(words)):
        for other in range(one):
            order = list(range(len(words)))
            order[one], order[other] = other, one
            seen.append(checksum(values[order], dtype).item())
    assert seen.count(seen[0]) == 1
