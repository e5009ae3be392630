"""The user's own advantage estimator and policy loss, loaded and tried before any model is."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.algorithms.config import AlgorithmSection, PolicyLossSection
from megarl.algorithms.invariance import check_estimator, check_policy_loss, estimates_of, loss_of
from megarl.algorithms.losses import PolicyLoss
from megarl.config.custom_functions import Call
from megarl.platform.errors import UserError
from megarl.platform.functions import load_function
from megarl.platform.slow_loads import reported

CustomEstimator = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""Takes tensors by name, as `check_estimator` describes them; returns advantages and perhaps returns, `[B, T]`."""
CustomLoss = Callable[[Mapping[str, Tensor]], PolicyLoss]
"""Takes tensors by name, as `check_policy_loss` describes them."""


def load_estimator(algorithm: AlgorithmSection) -> CustomEstimator | None:
    """Load the user's estimator; None if the configuration chooses a built-in estimator.

    Raises:
        UserError: the file does not load, the function does not fit its arguments, or `check_estimator` refuses it.
    """
    if algorithm.adv_estimator != "custom":
        return None
    call = Call.of_estimator(algorithm.custom_estimator)
    return partial(estimates_of, _load(call, check_estimator), kwargs=call.kwargs)


def load_loss(section: PolicyLossSection) -> CustomLoss | None:
    """Load the user's policy loss; None if the configuration chooses a built-in loss.

    Raises:
        UserError: the file does not load, the function does not fit its arguments, or `check_policy_loss` refuses it.
    """
    if section.loss_mode != "custom":
        return None
    call = Call.of_loss(section)
    return partial(loss_of, _load(call, check_policy_loss), kwargs=call.kwargs)


def _load(call: Call, check: Callable[..., None]) -> Callable[..., Any]:
    """Return the function of `call`, after `check` has tried it on random batches."""
    with reported(f"{call.key}.path", call.path):
        function = load_function(Path(call.path), call.name, key=f"{call.key}.path")
    for key, message in call.faults(inspect.signature(function)):
        raise UserError(f"{key}: {message}")
    try:
        check(function, **call.kwargs)
    except (Exception, SystemExit) as error:  # the user's code may raise anything; the message names the function
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{call.key}.path: {call} fails on random batches: {reason}; try it in a test of yours with "
            f"megarl.algorithms.invariance.{check.__name__}"
        ) from error
    return function
