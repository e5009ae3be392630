"""A function in a Python file of the user: its signature, read without running the file, and the function itself."""

import ast
import importlib.util
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.platform import custom_code
from megarl.platform.custom_code import module_name, place_of
from megarl.platform.errors import UserError

_KEYWORDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_MAKES_NAMES = {"exec", "globals", "locals", "setattr", "vars", "__getattr__"}


def definition_in(path: Path, name: str) -> ast.stmt | None:
    """Return the definition of a function or a class in a file; None if only running the file can tell.

    A name that is imported, assigned, or defined twice or under a condition is known only after loading.

    Raises:
        UserError: the file cannot be parsed, or nothing in it can have this name.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise UserError(f"{path} fails to load: {type(error).__name__}: {error}") from error
    found = list(bindings(tree.body))
    definitions = [node for bound, node in found if bound == name]
    if not definitions and not any(map(_hides_names, ast.walk(tree))):
        own = [bound for bound, node in found if not isinstance(node, ast.Import | ast.ImportFrom)]
        raise UserError(missing(path, name, own))
    if len(definitions) != 1:
        return None
    return next((statement for statement in tree.body if statement is definitions[0]), None)


def signature_in(path: Path, name: str) -> Signature | None:
    """Return the signature of a function that a file defines; None if only running the file can tell.

    Raises:
        UserError: as for `definition_in`.
    """
    definition = definition_in(path, name)
    return written(definition) if definition else None


def load_module(path: Path, *, key: str) -> ModuleType:
    """Run a file as a module.

    Raises:
        UserError: there is no such file, or it fails to load; names the `key` of the configuration.
    """
    if not path.is_file():
        raise UserError(f"{key}: no such file: {path}")
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{key}: {path} is not a Python file: name a file that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class up through its module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything; the message names the file
        description = f"{type(error).__name__}: {error}{place_of(error)}{_remedy(error, path.absolute())}"
        raise UserError(f"{key}: {path} fails to load: {description}") from error
    return module


def _remedy(error: BaseException, path: Path) -> str:
    """Return how a file finds a module of its directory; '' if the error is another."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    name = error.name.removeprefix(f"{custom_code.__name__}.")
    root = path.parent
    place = root.joinpath(*name.split("."))
    if not place.with_suffix(".py").is_file() and not any(place.glob("*.py")):
        return ""
    is_relative = name != error.name
    if not is_relative and str(root) in sys.path:
        return ""
    while is_relative and (root / "__init__.py").is_file():
        name = f"{root.name}.{name}"
        root = root.parent
    return f": start the command with PYTHONPATH={shlex.quote(str(root))}, and import it as {name}"


def load_function(path: Path, name: str, *, key: str) -> Callable[..., Any]:
    """Run a file as a module and return its function `name`.

    Raises:
        UserError: as for `load_module`, and if there is no such function.
    """
    module = load_module(path, key=key)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key}: {missing(path, name, defined_in(module))}")
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


def missing(path: Path, name: str, others: Collection[str]) -> str:
    """Say that a file has no such function, and list the functions that it has."""
    return f"{path} has no function {name!r}; it has {', '.join(dict.fromkeys(others)) or 'none'}"


def written(node: ast.AST) -> Signature | None:
    """Return the signature of a function without annotations and values of defaults; None if only loading shows it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _signature(node.args)
    return None


def bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
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


def _hides_names(node: ast.AST) -> bool:
    """Return whether a node may give the module names that its text does not show."""
    match node:
        case ast.ImportFrom():
            return any(alias.name == "*" for alias in node.names)
        case ast.Name(id=name) | ast.FunctionDef(name=name):
            return name in _MAKES_NAMES
    return False


def _signature(arguments: ast.arguments) -> Signature:
    """Return the signature that these parameters make."""
    kinds: dict[str, Any] = {argument.arg: Parameter.POSITIONAL_ONLY for argument in arguments.posonlyargs}
    kinds |= {argument.arg: Parameter.POSITIONAL_OR_KEYWORD for argument in arguments.args}
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
