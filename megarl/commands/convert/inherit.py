"""The YAML of another trainer: the files that it is based on, and its links between keys."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.commands.convert.expand import UNKNOWN
from megarl.config.layers import YAML
from megarl.config.links import UNREADABLE, follow, parse
from megarl.config.load import merged_trees
from megarl.platform.errors import UserError
from megarl.section import flatten, listed

_RELATIVE = re.compile(r"\$\{(\.+)(\w)")
_VARIABLE = "${oc.env:"


def tree_of(path: Path) -> dict[str, object] | None:
    """Return a YAML file merged over its base files; None if it cannot be read, or holds no keys."""
    try:
        tree = _read_tree(path)
    except (*UNREADABLE, OSError):
        return None
    return tree if isinstance(tree, dict) else None


def _read_tree(path: Path, above: tuple[Path, ...] = ()) -> object:
    """Return a YAML file merged over those that its `defaults` name; the names of absent ones stay there."""
    tree = parse(path.read_text(encoding="utf-8"), lenient=True)
    if not isinstance(tree, dict) or not isinstance(tree.get("defaults"), str | list):
        return tree
    base: dict[str, object] = {}
    absent = []
    for name in listed(tree["defaults"]):
        file = path.parent / str(name)
        is_there = file.suffix in YAML and file.is_file() and file.resolve() not in above
        parent = _read_tree(file, (*above, path.resolve())) if is_there else None
        if isinstance(parent, dict):
            base = merged_trees(base, parent)
        else:
            absent.append(name)
    own = {key: value for key, value in tree.items() if key != "defaults"}
    return {**merged_trees(base, own), **({"defaults": absent} if absent else {})}


def resolved(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a tree with their links followed; `UNKNOWN` for a value that no link leads to."""
    values = {key: _absolute(key, value) for key, value in flatten(tree)}
    for key, value in values.items():
        if isinstance(value, str) and _VARIABLE in value:
            yield key, value
            continue
        try:
            found = follow(key, values)
        except UserError:
            found = UNKNOWN
        yield key, UNKNOWN if isinstance(found, str) and "${" in found else found


def _absolute(key: str, value: object) -> object:
    """Return a text with `${.name}`, a key of the same section, as `${section.name}`."""
    if not isinstance(value, str):
        return value
    parts = key.split(".")
    return _RELATIVE.sub(lambda link: f"${{{'.'.join([*parts[: -len(link[1])], link[2]])}", value)
