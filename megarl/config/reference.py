"""The text of docs/configuration.md and of `megarl config`: every key, with type, default, docstring and condition."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megarl.config.links import shown
from megarl.config.root import LINKS, Config, RewardTrainConfig, SFTConfig, VerifyConfig
from megarl.config.schema import MANDATORY, Schema
from megarl.config.unread import in_words

ROOTS: Mapping[type, tuple[str, str]] = {
    Config: ("Training from rewards", "train"),
    SFTConfig: ("Supervised fine-tuning", "sft"),
    RewardTrainConfig: ("Training a reward model", "train_reward"),
    VerifyConfig: ("Verifying the weight sync", "verify"),
}
"""Root -> the heading of its part of the page, and the command that reads it."""
REQUIRED = "required"  # instead of a default
HUGE = 1e6  # larger bounds only catch slips of the keyboard
WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null", dict: "mapping"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the page."""

    name: str
    kind: str
    default: str
    text: str
    condition: str  # when the key is read; empty: always


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of the page."""

    title: str
    text: str
    condition: str  # when the section is read; empty: always
    twin: str | None  # the title of an earlier part with the same keys: `keys` are those that differ
    keys: tuple[Key, ...]


def parts() -> dict[type, list[Part]]:
    """Return the parts of the page by root; a section that several places share is written out at the first."""
    first: dict[type, tuple[str, str, dict[str, Key]]] = {}
    found: dict[type, list[Part]] = {root: [] for root in ROOTS}
    for root, (_, command) in ROOTS.items():
        schema = Schema.of(root)
        for path, cls in _sections(root, ""):
            title = path if root is Config else f"{command}: {path or 'the root'}"
            keys = {key.name: key for key in _keys(cls, f"{path}.".lstrip("."), schema, root, section=path)}
            twin, twin_path, known = first.setdefault(cls, (title, path, keys))
            differ = [key for name, key in keys.items() if not _is_same(key, known[name], f"{twin_path}.{name}")]
            if keys:
                text = " ".join((inspect.getdoc(cls) or "").split())
                own = twin == title
                part = Part(
                    title=title,
                    text=text,
                    condition=_condition(path, root, schema),
                    twin=None if own else twin,
                    keys=tuple(keys.values() if own else differ),
                )
                found[root].append(part)
    return found


def keys_of(root: type) -> dict[str, Key]:
    """Return every key that can be set under a root, by its dotted path."""
    schema = Schema.of(root)
    return {
        f"{path}.{key.name}".lstrip("."): key
        for path, cls in _sections(root, "")
        for key in _keys(cls, f"{path}.".lstrip("."), schema, root)
    }


def sections_of(root: type) -> dict[str, str]:
    """Return the docstring of every section under a root, by its dotted path."""
    return {path: " ".join((inspect.getdoc(cls) or "").split()) for path, cls in _sections(root, "") if path}


def _is_same(key: Key, known: Key, path: str) -> bool:
    same_default = key.default in (known.default, f"follows `{path}`")
    return same_default and key.text == known.text and key.condition in ("", known.condition)


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    yield path, cls
    hints = get_type_hints(cls)
    for key in fields(cls):
        if is_dataclass(hints[key.name]):
            yield from _sections(hints[key.name], f"{path}.{key.name}".lstrip("."))


def _keys(cls: type, prefix: str, schema: Schema, root: type, *, section: str = "") -> Iterator[Key]:
    hints = get_type_hints(cls, include_extras=True)
    texts = _docstrings(cls)
    for field in fields(cls):
        path = prefix + field.name
        if path in schema.leaves:
            yield Key(
                name=field.name,
                kind=_kind(hints[field.name]),
                default=_default(path, schema, root),
                text=texts[field.name],
                condition=_condition(path, root, schema, section=section),
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


def _condition(path: str, root: type, schema: Schema, *, section: str = "") -> str:
    """Say when the key or section at `path` is read; empty if it always is.

    Conditions of the section itself are left out.
    """
    if root is VerifyConfig:  # has no remarks
        return ""
    known = schema.read_if.get(section, ())
    own = [condition for condition in schema.read_if.get(path, ()) if condition not in known]
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
