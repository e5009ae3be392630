"""Checks that a user's reward accepts its arguments, by its file or by the reward itself, and knows its form.

A reward is a function, or a class whose instances are called. It scores one response, or a batch of them.
"""

import ast
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType
from typing import Any

from megarl.platform.errors import UserError
from megarl.platform.functions import bindings, definition_in, takes, unmet, written

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of a reward, all of them keywords."""
DATA_SOURCE = ARGUMENTS[0]
"""Also the name in `reward_model.weights` of the rule that the row's data source picks."""
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of a batch function: lists of the values of `ARGUMENTS`, in the same order."""
IDS = "solution_ids"
"""A further argument, for a reward whose parameters name it: the token ids of the response, or a list of those."""
PROMPT = "prompt"
"""The text of the prompt, which only a judge receives."""
BATCH_NAME = "compute_score_batch"
METHODS = ("__call__", "compute_score", BATCH_NAME)
"""The methods that score; the first that a class has is called."""
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_KWARGS = "custom_reward_function.reward_kwargs"


@dataclass(frozen=True)
class Form:
    """The way to call a reward."""

    is_batch: bool = False  # for several responses, with lists
    is_async: bool = False  # its result is awaited
    takes_ids: bool = False  # it receives `solution_ids`

    @property
    def takes_several(self) -> bool:
        """Return whether a process can handle several responses at once."""
        return self.is_batch or self.is_async


def form_of(reward: object, name: str) -> Form:
    """Return the form of a function or a class without faults."""
    called = reward
    if inspect.isclass(reward):
        name = method_of(reward) or ""
        called = getattr(reward, name, reward)
    is_async = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004
    signature = _signature_of(called)
    if signature is None:
        return Form(is_async=is_async)
    return Form(is_batch=_is_batch(signature, name), is_async=is_async, takes_ids=IDS in _named(signature))


def method_of(cls: type) -> str | None:
    """Return the name of the method that scores; None if the class has none."""
    names = {name for base in cls.__mro__ for name in vars(base)}
    return next((name for name in METHODS if name in names), None)


def fault_in_file(path: Path, name: str, kwargs: Collection[str] = ()) -> str | None:
    """Describe the fault of the reward `name` of a Python file without running the file; None if none is known.

    A reward that is decorated, derived from another class, or that `definition_in` does not find, can only be checked
    after loading.
    """
    if path.suffix != ".py":
        return f"{path} is not a Python file"
    try:
        reward = definition_in(path, name)
    except UserError as error:
        return str(error)
    if isinstance(reward, ast.ClassDef):
        return _fault_of_class_text(reward, path, kwargs)
    return _fault_of_call(written(reward), f"{path}: {name}", name, kwargs) if reward else None


def fault_of(reward: object, path: Path, name: str, kwargs: Collection[str] = ()) -> str | None:
    """Describe why a reward cannot be called; None if it can, or if its signature is unknown."""
    if not inspect.isclass(reward):
        return _fault_of_call(_signature_of(reward), f"{path}: {name}", name, kwargs)
    method = method_of(reward)
    if method is None:
        return _no_method(path, name)
    call = _signature_of(getattr(reward, method))
    if call and isinstance(inspect.getattr_static(reward, method), FunctionType):
        call = _without_self(call)
    fault = _fault_of_construction(_signature_of(reward), path, name, kwargs)
    return fault or _fault_of_call(call, f"{path}: {name}.{method}", method)


def _fault_of_call(signature: Signature | None, place: str, name: str, kwargs: Collection[str] = ()) -> str | None:
    """Describe the parameters that do not fit the call of a reward; None if all fit, or if they are unknown."""
    if signature is None:
        return None
    arguments = BATCH_ARGUMENTS if _is_batch(signature, name) else ARGUMENTS
    unknown = [argument for argument in (*arguments, *kwargs) if not takes(signature, argument)]
    needed = unmet(signature, (*arguments, IDS, *kwargs))
    if not unknown and not needed:
        return None
    faults = [f"does not accept {', '.join(unknown)} as a keyword"] if unknown else []
    faults += [f"needs {', '.join(needed)}, which is not given"] if needed else []
    call = ", ".join(f"{argument}=..." for argument in (*arguments, *kwargs))
    return f"{place} {' and '.join(faults)}: the call is {name}({call}); **kwargs accepts unneeded arguments"


def _fault_of_construction(signature: Signature | None, path: Path, name: str, kwargs: Collection[str]) -> str | None:
    if signature is None:
        return None
    unknown = [name for name in kwargs if not takes(signature, name)]
    needed = unmet(signature, kwargs)
    faults = [f"does not accept {', '.join(unknown)}, which {_KWARGS} gives"] if unknown else []
    faults += [f"needs {', '.join(needed)}: give it in {_KWARGS}"] if needed else []
    return f"{path}: the constructor of {name} {' and '.join(faults)}" if faults else None


def _fault_of_class_text(cls: ast.ClassDef, path: Path, kwargs: Collection[str]) -> str | None:
    if cls.bases or cls.keywords or cls.decorator_list:
        return None
    found = list(bindings(cls.body))
    bound = {name: node for name, node in found}
    if len(bound) != len(found) or "__new__" in bound:
        return None
    method = next((name for name in METHODS if name in bound), None)
    if method is None:
        return _no_method(path, cls.name)
    constructor = _written_without_self(bound["__init__"]) if "__init__" in bound else Signature()
    fault = _fault_of_construction(constructor, path, cls.name, kwargs)
    return fault or _fault_of_call(_written_without_self(bound[method]), f"{path}: {cls.name}.{method}", method)


def _no_method(path: Path, name: str) -> str:
    return f"{path}: the class {name} has none of the methods {', '.join(METHODS)}: define one that scores a response"


def _is_batch(signature: Signature, name: str) -> bool:
    """Return whether a call takes lists: its parameters tell, or its name if it has none of either kind."""
    taken = _named(signature)
    if taken & {*ARGUMENTS}:
        return False
    return bool(taken & {*BATCH_ARGUMENTS}) or name == BATCH_NAME


def _named(signature: Signature) -> set[str]:
    """Return the parameters that a keyword can give, except those of `**kwargs`."""
    return {parameter.name for parameter in signature.parameters.values() if parameter.kind in _BY_KEYWORD}


def _signature_of(called: Any) -> Signature | None:
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):  # C code
        return None


def _written_without_self(method: ast.AST) -> Signature | None:
    signature = written(method)
    return _without_self(signature) if signature else None


def _without_self(signature: Signature) -> Signature:
    parameters = list(signature.parameters.values())
    keeps = not parameters or parameters[0].kind is Parameter.VAR_POSITIONAL
    return signature if keeps else signature.replace(parameters=parameters[1:])
