"""Checks that a user's function accepts the arguments of a reward, by its file or by the function itself."""

import ast
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of a reward, all of them keywords."""
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_MAKES_NAMES = {"exec", "globals", "locals", "setattr", "vars", "__getattr__"}


def fault_in_file(path: Path, name: str) -> str | None:
    """Describe the fault of the function `name` of a Python file without running the file; None if none is known.

    A function that is decorated, imported, assigned or defined more than once can only be checked after loading.
    """
    if path.suffix != ".py":
        return f"{path} is not a Python file"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        return f"{path} fails to load: {type(error).__name__}: {error}"
    found = list(_bindings(tree))
    definitions = [node for bound, node in found if bound == name]
    if not definitions:
        own = [bound for bound, node in found if not isinstance(node, ast.Import | ast.ImportFrom)]
        return None if _hides_names(tree) else missing(path, name, own)
    function = definitions[-1]
    if len(definitions) > 1 or function not in tree.body:
        return None
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.decorator_list:
        return None
    if isinstance(function, ast.AsyncFunctionDef):
        return f"{path}: {name} is asynchronous, and its result is never awaited: write def instead of async def"
    return mismatch(path, name, _signature(function.args))


def fault_of(function: Callable[..., Any], path: Path, name: str) -> str | None:
    """Describe why a reward cannot be called; None if it can, or if its signature is unknown."""
    if inspect.iscoroutinefunction(function):
        return f"{path}: {name} is asynchronous, and its result is never awaited: write def instead of async def"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # C code
        return None
    return mismatch(path, name, signature)


def missing(path: Path, name: str, others: list[str]) -> str:
    """Say that a file has no such function, and list the functions that it has."""
    return f"{path} has no function {name!r}; it has {', '.join(dict.fromkeys(others)) or 'none'}"


def mismatch(path: Path, name: str, signature: Signature) -> str | None:
    """Describe the parameters that do not fit the call of a reward; None if all fit."""
    parameters = signature.parameters.values()
    taken = {parameter.name for parameter in parameters if parameter.kind in _BY_KEYWORD}
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [] if takes_all else [argument for argument in ARGUMENTS if argument not in taken]
    unmet = [
        parameter.name
        for parameter in parameters
        if parameter.default is Parameter.empty
        and (
            parameter.kind is Parameter.POSITIONAL_ONLY
            or (parameter.kind in _BY_KEYWORD and parameter.name not in ARGUMENTS)
        )
    ]
    if not unknown and not unmet:
        return None
    faults = [f"does not accept {', '.join(unknown)} as a keyword"] if unknown else []
    faults += [f"needs {', '.join(unmet)}, which is not given"] if unmet else []
    call = ", ".join(f"{argument}=..." for argument in ARGUMENTS)
    return f"{path}: {name} {' and '.join(faults)}: the call is {name}({call}); **kwargs accepts unneeded arguments"


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that the file binds at its top level, also below if, try, with and loops, and its node."""
    waiting: list[ast.AST] = list(reversed(tree.body))
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
