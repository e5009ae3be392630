"""Checks that a user's reward accepts its arguments, by its file or by the reward itself, and knows its form.

A reward is a function, or a class whose instances are called. It scores one response, or a batch of them.
"""

import ast
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType
from typing import Any

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of a reward, all of them keywords."""
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of a batch function: lists of the former, in their order."""
BATCH_NAME = "compute_score_batch"
METHODS = ("__call__", "compute_score", BATCH_NAME)
"""The methods that score; the first that a class has is called."""
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_MAKES_NAMES = {"exec", "globals", "locals", "setattr", "vars", "__getattr__"}
_KWARGS = "custom_reward_function.reward_kwargs"


@dataclass(frozen=True)
class Form:
    """The way to call a reward."""

    is_batch: bool = False  # for several responses, with lists
    is_async: bool = False  # its result is awaited

    @property
    def takes_several(self) -> bool:
        """Return whether a process can handle several responses at once."""
        return self.is_batch or self.is_async


def form_of(reward: Any, name: str) -> Form:
    """Return the form of a function or a class without faults."""
    called, name = reward, name
    called = reward
    if inspect.isclass(reward):
        name = method_of(reward) or ""
        called = getattr(reward, name, reward)
    is_async = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004
    signature = _signature_of(called)
    return Form(is_batch=signature is not None and _is_batch(signature, name), is_async=is_async)


def method_of(cls: type) -> str | None:
    """Return the name of the method that scores; None if the class has none."""
    names = {name for base in cls.__mro__ for name in vars(base)}
    return next((name for name in METHODS if name in names), None)


def fault_in_file(path: Path, name: str, kwargs: Collection[str] = ()) -> str | None:
    """Describe the fault of the reward `name` of a Python file without running the file; None if none is known.

    A reward that is decorated, imported, assigned, derived from another class or defined more than once can only be
    checked after loading.
    """
    if path.suffix != ".py":
        return f"{path} is not a Python file"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        return f"{path} fails to load: {type(error).__name__}: {error}"
    found = list(_bindings(tree.body))
    definitions = [node for bound, node in found if bound == name]
    if not definitions:
        own = [bound for bound, node in found if not isinstance(node, ast.Import | ast.ImportFrom)]
        return None if _hides_names(tree) else missing(path, name, own)
    reward = definitions[-1]
    if len(definitions) > 1 or reward not in tree.body:
        return None
    if isinstance(reward, ast.ClassDef):
        return _fault_of_class_text(reward, path, kwargs)
    return _fault_of_call(_written(reward), f"{path}: {name}", name, kwargs)


def fault_of(reward: Any, path: Path, name: str, kwargs: Collection[str] = ()) -> str | None:
    """Describe why a reward cannot be called; None if it can, or if its signature is unknown."""
    if not inspect.isclass(reward):
        return _fault_of_call(_signature_of(reward), f"{path}: {name}", name, kwargs)
    method = method_of(reward)
    if method is None:
        return _no_method(path, name)
    call = _signature_of(getattr(reward, method))
    if call and isinstance(inspect.getattr_static(reward, method), FunctionType):
        call = _without_self(call)
    constructor = _signature_of(reward)
    return _fault_of_construction(constructor, path, name, kwargs) or _fault_of_call(
        call, f"{path}: {name}.{method}", method
    )


def missing(path: Path, name: str, others: list[str]) -> str:
    """Say that a file has no such function, and list the functions that it has."""
    return f"{path} has no function {name!r}; it has {', '.join(dict.fromkeys(others)) or 'none'}"


def _fault_of_call(signature: Signature | None, place: str, name: str, kwargs: Collection[str] = ()) -> str | None:
    """Describe the parameters that do not fit the call of a reward; None if all fit, or if they are unknown."""
    if signature is None:
        return None
    arguments = BATCH_ARGUMENTS if _is_batch(signature, name) else ARGUMENTS
    unknown, unmet = _unfit(signature, (*arguments, *kwargs))
    if not unknown and not unmet:
        return None
    faults = [f"does not accept {', '.join(unknown)} as a keyword"] if unknown else []
    faults += [f"needs {', '.join(unmet)}, which is not given"] if unmet else []
    call = ", ".join(f"{argument}=..." for argument in (*arguments, *kwargs))
    return f"{place} {' and '.join(faults)}: the call is {name}({call}); **kwargs accepts unneeded arguments"


def _fault_of_construction(signature: Signature | None, path: Path, name: str, kwargs: Collection[str]) -> str | None:
    if signature is None:
        return None
    unknown, unmet = _unfit(signature, kwargs)
    faults = [f"does not accept {', '.join(unknown)}, which {_KWARGS} gives"] if unknown else []
    faults += [f"needs {', '.join(unmet)}: give it in {_KWARGS}"] if unmet else []
    return f"{path}: the constructor of {name} {' and '.join(faults)}" if faults else None


def _fault_of_class_text(cls: ast.ClassDef, path: Path, kwargs: Collection[str]) -> str | None:
    if cls.bases or cls.keywords or cls.decorator_list:
        return None
    found = list(_bindings(cls.body))
    bound = {name: node for name, node in found}
    if len(bound) != len(found) or "__new__" in bound:
        return None
    method = next((name for name in METHODS if name in bound), None)
    if method is None:
        return _no_method(path, cls.name)
    constructor = _written(bound["__init__"]) if "__init__" in bound else Signature([Parameter("self", _BY_KEYWORD[0])])
    call = _written(bound[method])
    return _fault_of_construction(constructor and _without_self(constructor), path, cls.name, kwargs) or _fault_of_call(
        call and _without_self(call), f"{path}: {cls.name}.{method}", method
    )


def _no_method(path: Path, name: str) -> str:
    return f"{path}: the class {name} has none of the methods {', '.join(METHODS)}: define one that scores a response"


def _unfit(signature: Signature, given: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the given keywords that a call does not take, and the parameters that it still needs."""
    parameters = signature.parameters.values()
    taken = {parameter.name for parameter in parameters if parameter.kind in _BY_KEYWORD}
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [] if takes_all else [name for name in given if name not in taken]
    unmet = [
        parameter.name
        for parameter in parameters
        if parameter.default is Parameter.empty
        and (
            parameter.kind is Parameter.POSITIONAL_ONLY
            or (parameter.kind in _BY_KEYWORD and parameter.name not in given)
        )
    ]
    return unknown, unmet


def _is_batch(signature: Signature, name: str) -> bool:
    """Return whether a call takes lists: its parameters tell, or its name if it has none of either kind."""
    taken = {parameter.name for parameter in signature.parameters.values() if parameter.kind in _BY_KEYWORD}
    if taken & {*ARGUMENTS}:
        return False
    return bool(taken & {*BATCH_ARGUMENTS}) or name == BATCH_NAME


def _signature_of(called: Any) -> Signature | None:
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):  # C code
        return None


def _without_self(signature: Signature) -> Signature:
    parameters = list(signature.parameters.values())
    keeps = not parameters or parameters[0].kind is Parameter.VAR_POSITIONAL
    return signature if keeps else signature.replace(parameters=parameters[1:])


def _written(node: ast.AST) -> Signature | None:
    """Return the signature of a function that its text defines; None if only running the file shows it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _signature(node.args)
    return None


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that statements bind, also below if, try, with and loops, and its node."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
                continue
            case ast.Import() | ast.ImportFrom():
                yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                yield node.id, node
            case ast.Lambda():
                continue
        waiting += reversed(list(ast.iter_child_nodes(node)))


def _hides_names(tree: ast.Module) -> bool:
    """Return whether the file may have names that its text does not show."""
    return any(
        (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
        or (isinstance(node, ast.Name) and node.id in _MAKES_NAMES)
        or (isinstance(node, ast.FunctionDef) and node.name in _MAKES_NAMES)
        for node in ast.walk(tree)
    )


def _signature(arguments: ast.arguments) -> Signature:
    """Return the function's `inspect.signature` without annotations and values of defaults."""
    kinds = {argument.arg: Parameter.POSITIONAL_ONLY for argument in arguments.posonlyargs} | {
        argument.arg: Parameter.POSITIONAL_OR_KEYWORD for argument in arguments.args
    }
    first_default = len(kinds) - len(arguments.defaults)
    parameters = [
        Parameter(name, kind, default=Parameter.empty if place < first_default else None)
        for place, (name, kind) in enumerate(kinds.items())
    ]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=None if default else Parameter.empty)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)
