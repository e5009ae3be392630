"""Loads the reward in a user's file: a function, or a class that is constructed once in each process."""

import hashlib
import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.platform.custom_code import place_of
from megarl.platform.errors import UserError
from megarl.platform.functions import defined_in, load_module, missing
from megarl.rewards.calls import AsBatch, OneByOne
from megarl.rewards.signature import ARGUMENTS, IDS, Form, fault_of, form_of, method_of
from megarl.sandbox.protocol import GroupReward

DIGEST = "SHA-256: "
"""The prefix of a digest in a description of a file."""
_PATH, _NAME, _KWARGS = (f"custom_reward_function.{key}" for key in ("path", "name", "reward_kwargs"))


def provenance(path: Path, name: str) -> str:
    """Describe a custom function: its name, its file and 12 hex digits of the file's SHA-256."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "it is not here"
    return f"{name} of {path.absolute()} ({DIGEST}{digest})"


def check_custom(path: Path, name: str, kwargs: Mapping[str, object]) -> Form:
    """Run the file, and return the form of its reward; construct no class.

    Raises UserError if the file does not load, has no such function or class, or the call does not fit.
    """
    return form_of(_find(path, name, kwargs), name)


def load_custom(path: Path, name: str, kwargs: Mapping[str, object]) -> GroupReward:
    """Return the reward; a class is constructed with `kwargs`. UserError as of `check_custom`."""
    found = _find(path, name, kwargs)
    form = form_of(found, name)
    if inspect.isclass(found):
        reward = getattr(_construct(found, path, kwargs), method_of(found) or "__call__")
    else:
        reward = partial(found, **kwargs) if kwargs else found
    names = (*ARGUMENTS, IDS) if form.takes_ids else ARGUMENTS
    if form.is_async:
        from megarl.rewards.concurrent_calls import Concurrently, in_event_loop

        if form.is_batch:
            return AsBatch(in_event_loop(reward), takes_ids=form.takes_ids)
        return Concurrently(reward, names)
    return AsBatch(reward, takes_ids=form.takes_ids) if form.is_batch else OneByOne(reward, names)


def _find(path: Path, name: str, kwargs: Mapping[str, object]) -> Any:
    module = load_module(path, key=_PATH)
    reward = getattr(module, name, None)
    if not callable(reward):
        raise UserError(f"{_NAME}: {missing(path, name, defined_in(module))}")
    fault = fault_of(reward, path, name, kwargs)
    if fault:
        raise UserError(f"{_NAME}: {fault}")
    return reward


def _construct(cls: type, path: Path, kwargs: Mapping[str, object]) -> object:
    try:
        return cls(**kwargs)
    except Exception as error:  # the user's code may raise anything; the message names the class
        given = ", ".join(f"{key}=..." for key in kwargs)
        description = f"{type(error).__name__}: {error}{place_of(error)}"
        raise UserError(f"{_KWARGS}: {path}: {cls.__name__}({given}) fails: {description}") from error
