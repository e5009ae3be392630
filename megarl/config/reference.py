"""The explanation of every key, for `megarl config` and docs/configuration.md: type, default, text and condition."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megarl.config.links import shown
from megarl.config.root import LINKS, VerifyConfig
from megarl.config.schema import MANDATORY, Schema
from megarl.config.unread import in_words

REQUIRED = "required"  # instead of a default
HUGE = 1e6  # larger bounds only catch slips of the keyboard
WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null", dict: "mapping"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """The explanation of a key."""

    name: str
    kind: str
    default: str
    text: str
    condition: str  # when the key is read; empty: always


def keys_of(root: type) -> dict[str, Key]:
    """Return every key that can be set under a root, by its dotted path."""
    return {f"{path}.{key.name}".lstrip("."): key for path, cls in walk(root) for key in keys_in(cls, path, root)}


def sections_of(root: type) -> dict[str, str]:
    """Return the docstring of every section under a root, by its dotted path."""
    return {path: text_of(cls) for path, cls in walk(root) if path}


def text_of(section: type) -> str:
    """Return the docstring of a section in one line."""
    return " ".join((inspect.getdoc(section) or "").split())


def walk(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dotted path and the class of a section and of each section in it."""
    yield path, cls
    hints = get_type_hints(cls)
    for key in fields(cls):
        if is_dataclass(hints[key.name]):
            yield from walk(hints[key.name], f"{path}.{key.name}".lstrip("."))


def keys_in(cls: type, path: str, root: type, *, within: bool = False) -> Iterator[Key]:
    """Yield the keys of the section at `path` under a root; `within`: without the conditions of the section."""
    schema = Schema.of(root)
    hints = get_type_hints(cls, include_extras=True)
    texts = _docstrings(cls)
    for field in fields(cls):
        key = f"{path}.{field.name}".lstrip(".")
        if key in schema.leaves:
            yield Key(
                name=field.name,
                kind=_kind(hints[field.name]),
                default=_default(key, schema, root),
                text=texts[field.name],
                condition=condition_of(key, root, section=path if within else ""),
            )


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields of a section and of its bases, by name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
        for line, below in zip(body, body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[ast.unparse(line.target)] = " ".join(str(below.value.value).split())
    return found


def condition_of(path: str, root: type, *, section: str = "") -> str:
    """Say when the key or section at `path` is read; empty if it always is.

    Conditions of the section itself are left out.
    """
    if root is VerifyConfig:  # has no remarks
        return ""
    read_if = Schema.of(root).read_if
    known = read_if.get(section, ())
    own = [condition for condition in read_if.get(path, ()) if condition not in known]
    never = [condition.why for condition in own if not condition.fact]
    if never:
        return f"*Not read {never[0]}.*"
    conditions = dict.fromkeys(
        in_words(one).replace(f"`{section}." * bool(section), "`" * bool(section)) for one in own
    )
    return f"*Read only if {', and '.join(conditions)}.*" if conditions else ""


def _default(path: str, schema: Schema, root: type) -> str:
    link = LINKS[root].get(path)
    if link:
        return f"follows `{link[2:-1]}`" if link.startswith("${") else f"`{link}`"
    default = schema.leaves[path]
    return REQUIRED if default == MANDATORY else f"`{shown(default)}`"


def _kind(hint: Any) -> str:
    """Describe a type in words."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    if origin is Annotated:
        return f"{_kind(arguments[0])}{_bounds(arguments)}"
    if origin is list:
        return f"list of ({_kind(arguments[0])})" if get_origin(arguments[0]) is Literal else "list"
    if origin is tuple:
        return f"list of {len(arguments)} numbers"
    return WORDS[origin or hint]


def _bounds(annotated: tuple[object, ...]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [bound for extra in annotated[1:] for bound in getattr(extra, "metadata", ())]
    values = [(sign, getattr(bound, name, HUGE)) for bound in bounds for name, sign in signs.items()]
    found = [f"{sign} {value:g}" for sign, value in values if abs(value) < HUGE]
    return f" {', '.join(found)}" if found else ""
