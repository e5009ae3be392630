"""A reward that was given as a function, as a file that processes of its own load."""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from megarl.platform.errors import UserError
from megarl.platform.files import write_whole

REWARD_FILE = "reward.py"
Function = Callable[..., object]
Reward = Function | str | Path
"""A reward: a function or a class, or the Python file of one."""


def reward_keys(reward: Reward | None, directory: Path) -> dict[str, str]:
    """Return the keys that name a reward, none for the built-in ones. Raises UserError as `reward_file` does."""
    if reward is None:
        return {}
    file, name = reward_file(reward, directory)
    keys = {"custom_reward_function.path": str(file)}
    if name:
        keys["custom_reward_function.name"] = name
    return keys


def reward_file(reward: Reward, directory: Path) -> tuple[Path, str | None]:
    """Return the file of a reward, and its name there; None is the usual name.

    A function of a module is loaded from the file of the module. A function of a notebook or of the main program is
    written to `directory`, with the imports, the constants and the functions that it names.

    Args:
        reward: a function or a class, or the Python file of one.
        directory: where a file may be written.

    Raises:
        UserError: the source of the function cannot be found, or needs something that no file can hold.
    """
    if isinstance(reward, str | Path):
        return Path(reward).absolute(), None
    name = getattr(reward, "__name__", repr(reward))
    module = inspect.getmodule(reward)
    place = Path(getattr(module, "__file__", None) or "")
    is_of_module = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is reward
    if is_of_module and place.suffix == ".py":
        return place.absolute(), name
    if not name.isidentifier() or not isinstance(inspect.unwrap(reward), FunctionType):
        raise UserError(f"reward={name} is no function that `def` has named: define one, or name its file")
    file = directory / REWARD_FILE
    write_whole(file, "\n\n".join(_parts(reward, {name})).encode())
    return file, name


def _parts(decorated: Function, known: set[str]) -> Iterator[str]:
    """Yield what a function names, and its source. `known` are the names that are written already."""
    function: FunctionType = inspect.unwrap(decorated)
    source, definition = _source(function)
    if function is not decorated and not definition.decorator_list:
        raise UserError(
            f"reward={function.__name__} is wrapped by a call: write the call as a decorator above its `def`"
        )
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise UserError(
            f"reward={function.__name__} uses {names} of the function around it: define it at the top level"
        )
    used = _names(function.__code__) | _names_around(definition)
    for name in sorted(used & function.__globals__.keys() - known):
        known.add(name)
        value = function.__globals__[name]
        inner = inspect.unwrap(value) if callable(value) else value
        if isinstance(inner, FunctionType) and inner.__module__ == function.__module__:
            yield from _parts(value, known)
        else:
            yield _definition(name, value, function)
    yield source


def _source(function: FunctionType) -> tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the source of a function, as text and as a tree. Raises UserError if it is not known."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise UserError(f"the source of reward={function.__name__} is not known: write it to a file") from error
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise UserError(f"reward={function.__name__} is no function that `def` has named: define one, or name its file")
    return source, definition


def _names_around(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names in decorators, defaults and annotations, which Python reads when it defines the function."""
    parts = (definition.args, definition.returns or ast.Pass(), *definition.decorator_list)
    return {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}


def _names(code: CodeType) -> set[str]:
    """Return the global names and attributes that code uses, also in the functions within it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _definition(name: str, value: object, function: FunctionType) -> str:
    """Return a line that gives `name` its value.

    Raises:
        UserError: no line can.
    """
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    if module and module != function.__module__ and hasattr(value, "__name__"):
        return f"from {module} import {value.__name__} as {name}"
    text = repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} = float({text!r})"
    if _is_literal(text, value):
        return f"{name} = {text}"
    raise UserError(
        f"reward={function.__name__} uses {name}, a {type(value).__name__} that no file can hold: make it within the "
        "function, or write the reward to a file"
    )


def _is_literal(text: str, value: object) -> bool:
    """Return whether a text of Python is a constant of this value."""
    try:
        return bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
