"""A function in a Python file of the user: its signature, read without running the file, and the function itself."""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

_KEYWORDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def signature_in(path: Path, name: str) -> Signature | None:
    """Return the signature of a function that a file defines; None if only running the file can tell.

    A function that is imported, assigned, decorated or defined twice is known only after loading. Annotations and the
    values of defaults are left out.

    Raises:
        ValueError: the file cannot be parsed, or nothing in it can be the function.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise ValueError(f"{path} is not a Python file that loads: {type(error).__name__}: {error}") from error
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) == 1 and found[0] in tree.body and not found[0].decorator_list:
        return _signature(found[0])
    if not found and name not in re.findall(r"\w+", path.read_text(errors="replace")) and not _imports_all(tree):
        own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise ValueError(_missing(path, name, own))
    return None


def load_module(path: Path, *, key: str) -> ModuleType:
    """Run a file as a module.

    Raises:
        ValueError: there is no such file, or it fails to load; names the `key` of the configuration.
    """
    module_name = f"{key.replace('.', '_')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"{key}: {path} is not a Python file: name a file that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class up through its module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything; the message names the file
        raise ValueError(f"{key}: {path} fails to load: {type(error).__name__}: {error}") from error
    return module


def load_function(path: Path, name: str, *, key: str) -> Callable[..., Any]:
    """Run a file as a module and return its function `name`.

    Raises:
        ValueError: as for `load_module`, and if there is no such function.
    """
    module = load_module(path, key=key)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{key}: {_missing(path, name, defined_in(module))}")
    loaded: Callable[..., Any] = function
    return loaded


def defined_in(module: ModuleType) -> list[str]:
    """Return the names that a module defines itself."""
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]


def takes(signature: Signature, name: str) -> bool:
    """Return whether a function accepts the keyword `name`."""
    parameters = signature.parameters
    if name in parameters and parameters[name].kind in _KEYWORDS:
        return True
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


def unmet(signature: Signature, given: Collection[str]) -> list[str]:
    """Return the parameters without a default that a call with the keywords `given` leaves out."""
    needed = [parameter for parameter in signature.parameters.values() if parameter.default is Parameter.empty]
    return [
        parameter.name
        for parameter in needed
        if parameter.kind is Parameter.POSITIONAL_ONLY or (parameter.kind in _KEYWORDS and parameter.name not in given)
    ]


def _missing(path: Path, name: str, own: list[str]) -> str:
    return f"{path} has no function {name!r}; it has {', '.join(dict.fromkeys(own)) or 'none'}"


def _imports_all(tree: ast.Module) -> bool:
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return any(alias.name == "*" for node in imports for alias in node.names)


def _signature(function: ast.FunctionDef) -> Signature:
    """Return the signature of a function with the same parameters and nothing else, which is safe to make."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in filter(None, every):
        argument.annotation = None
    nothing = ast.Constant(None)
    arguments.defaults = [nothing for _ in arguments.defaults]
    arguments.kw_defaults = [default and nothing for default in arguments.kw_defaults]
    code = ast.Expression(ast.Lambda(args=arguments, body=nothing))
    return inspect.signature(eval(compile(ast.fix_missing_locations(code), "<signature>", "eval")))  # noqa: S307 - only names and None
