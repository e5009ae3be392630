"""The call of an estimator or a policy loss: a function takes what its parameters name."""

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from megarl.platform.functions import takes

V = TypeVar("V")


def arguments_of(function: Callable[..., object], given: Mapping[str, V]) -> dict[str, V]:
    """Return the values of `given` that `function` has parameters for; all, if it takes any keyword."""
    signature = inspect.signature(function)
    return {name: value for name, value in given.items() if takes(signature, name)}
