"""Values are computed once for a tensor, and freed with it or when there are later ones."""

import gc
import weakref

import torch

from megarl.learner.per_tensor import FEW, PerTensor


class Value:
    """A value of a tensor."""


def test_value_is_computed_once_for_each_tensor() -> None:
    values = PerTensor[Value]()
    keys = [torch.zeros(1) for _ in range(FEW)]
    found = [values.get(key, Value) for key in keys]
    assert [values.get(key, Value) for key in keys] == found
    assert len(set(found)) == FEW


def test_values_of_earlier_tensors_are_freed() -> None:
    """Rows that wait for the end of a mini-batch keep no masks."""
    values = PerTensor[Value]()
    keys = [torch.zeros(1) for _ in range(50)]
    found = [weakref.ref(values.get(key, Value)) for key in keys]
    gc.collect()
    assert [each() is not None for each in found] == [False] * (50 - FEW) + [True] * FEW


def test_values_are_freed_with_their_tensors() -> None:
    values = PerTensor[Value]()
    key = torch.zeros(1)
    found = weakref.ref(values.get(key, Value))
    del key
    gc.collect()
    assert found() is None
