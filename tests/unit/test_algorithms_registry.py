"""A built-in estimator or policy loss is one row of a table and one function."""

from inspect import signature

import pytest

from megarl.algorithms import advantages, losses
from megarl.algorithms.config import ESTIMATORS, LOSSES

GIVEN = {"lengths", "token_rewards", "scores", "groups", "mask", "values", "baselines"}
NEEDED = {"critic": {"values"}, "compares": {"groups"}, "greedy": {"baselines"}}


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "custom"])
def test_an_estimator_takes_what_its_row_says(name: str) -> None:
    row, taken = ESTIMATORS[name], set(signature(getattr(advantages, name)).parameters)
    assert taken - GIVEN == {*row.reads}
    for need, tensors in NEEDED.items():
        assert getattr(row, need) == bool(taken & tensors)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "custom"])
def test_policy_loss_chooses_tokens_if_registry_declares_it(name: str) -> None:
    assert ("chosen" in signature(getattr(losses, LOSSES[name].function)).parameters) == LOSSES[name].chooses
