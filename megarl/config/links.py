r"""YAML of the user, in which a value may follow another: `${a.b.c}` a key, `${oc.env:NAME,default}` a variable.

Links also stand within a text, a list or a mapping. `\${` is written for the characters themselves.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

from megarl.config.schema import MANDATORY
from megarl.platform.errors import UserError

LINK = re.compile(r"(?<!\\)\$\{\s*(?:oc\.env:\s*(?P<variable>\w+)\s*(?P<default>,[^{}]*)?|(?P<key>\w[\w.-]*?)\s*)\}")
_ESCAPE = "\\${"
UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""The errors of `parse`: PyYAML raises ValueError for numbers, dates and bytes, and RecursionError for deep nesting."""


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML in which 1e-6 is a number, a date is a text, and a key stands once."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # so that a value within itself is an error

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[object, object]:
        """Return a mapping, or raise an error for a key that stands twice."""
        found = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, ScalarNode) else key
            if name in found and key.tag != _MERGE:
                raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            found.add(name)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping

    def construct_text(self, node: ScalarNode) -> str:
        """Return a text, or raise an error for a link that is none."""
        text: str = self.construct_scalar(node)
        if "${" in LINK.sub("", text.replace(_ESCAPE, "")):
            raise ConstructorError(None, None, "a link is neither ${a.b.c} nor ${oc.env:NAME}", node.start_mark)
        return text


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}
_SHORT_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+$"),
    [*"-+0123456789."],
)
_Loader.add_implicit_resolver(*_SHORT_FLOAT)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


class _Lenient(_Loader):
    """YAML with links of any kind."""


_Lenient.add_constructor("tag:yaml.org,2002:str", _Loader.construct_scalar)


class Dumper(yaml.SafeDumper):
    """Puts a text in quotes if `_Loader` would read it as a number."""


Dumper.add_implicit_resolver(*_SHORT_FLOAT)


def dump(tree: Mapping[str, object]) -> str:
    """Return a tree as YAML that `parse` reads as the same values; links in it remain links."""
    return yaml.dump(dict(tree), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def escaped(value: object) -> Any:
    """Return a value whose texts have no links: `follow` makes of it the value that was given."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return value.replace("${", _ESCAPE) if isinstance(value, str) else value


def parse(text: str, *, lenient: bool = False) -> Any:
    """Return the value of a YAML text, its links unresolved; a `lenient` reading takes links of any kind."""
    return yaml.load(text, Loader=_Lenient if lenient else _Loader)  # noqa: S506 - a subclass of the safe loader


def shown(value: object) -> str:
    """Return a value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        value = list(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def follow(path: str, values: Mapping[str, object], trail: tuple[str, ...] = ()) -> object:
    """Return the value at the dotted `path`, a key of `values` or a part of a mapping there, with its links followed.

    Raises:
        UserError: a link leads to no value.
    """
    key = path
    while key and key not in values:
        key = key.rpartition(".")[0]
    if not key:
        raise UserError(f"there is no key {path}")
    if key in trail:
        raise UserError(f"{key} leads back to itself")
    if values[key] == MANDATORY:
        raise UserError(f"{key} has no value")
    found = _fill(values[key], values, (*trail, key))
    for part in filter(None, path[len(key) :].split(".")):
        if not isinstance(found, dict) or part not in found:
            raise UserError(f"there is no key {path}")
        found = found[part]
    return found


def _fill(value: object, values: Mapping[str, object], trail: tuple[str, ...]) -> object:
    if isinstance(value, dict):
        return {key: _fill(item, values, trail) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, values, trail) for item in value]
    if not isinstance(value, str):
        return value
    link = LINK.fullmatch(value)
    if link:
        return _lead(link, values, trail)
    return LINK.sub(lambda link: str(_lead(link, values, trail)), value).replace(_ESCAPE, "${")


def _lead(link: re.Match[str], values: Mapping[str, object], trail: tuple[str, ...]) -> object:
    """Return what a link leads to."""
    if link["key"]:
        return follow(link["key"], values, trail)
    variable = link["variable"]
    default = link["default"]
    if variable in os.environ:
        return os.environ[variable]
    if default is None:
        raise UserError(f"there is no variable {variable} in the environment")
    try:
        return parse(default[1:])
    except UNREADABLE as error:
        raise UserError(f"the value for a missing {variable} is not valid YAML: put it in quotes") from error
