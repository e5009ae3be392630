"""A decision for deterministic kernels reaches torch within the learner's work, and nothing outside of it."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from megarl.platform.determinism import decide_determinism, deterministic_kernels, is_deterministic


@pytest.fixture(autouse=True)
def decided_again() -> Iterator[None]:
    with patch.dict(os.environ):
        yield
    decide_determinism(False)


@pytest.mark.parametrize("wanted", [True, False])
def test_torch_takes_deterministic_kernels_within_the_block(wanted: bool) -> None:
    decide_determinism(wanted)
    assert is_deterministic() == wanted
    with deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled() == wanted
    assert not torch.are_deterministic_algorithms_enabled()
    assert (os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0") == wanted


def test_an_error_within_the_block_ends_it() -> None:
    decide_determinism(True)
    with pytest.raises(ZeroDivisionError), deterministic_kernels():
        _ = 1 / 0
    assert not torch.are_deterministic_algorithms_enabled()
