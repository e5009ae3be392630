"""The tree of keys under a root section: paths, defaults, and the path that a misspelt path was meant to be."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Self, get_type_hints

MANDATORY = "???"  # the mark of a key that has no value yet


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Every key under one root."""

    leaves: Mapping[str, Any]  # dotted path -> default, or MANDATORY
    sections: frozenset[str]  # dotted paths of the sections between root and leaves

    @classmethod
    def of(cls, root: type) -> Self:
        """Walk the dataclass `root`."""
        leaves: dict[str, Any] = {}
        sections: set[str] = set()
        for path, default, is_section in _walk(root, _defaults(root), ""):
            if is_section:
                sections.add(path)
            else:
                leaves[path] = default
        return cls(leaves=leaves, sections=frozenset(sections))

    def __contains__(self, path: str) -> bool:
        return path in self.leaves or path in self.sections

    def nearest(self, path: str) -> str | None:
        """Return the key that `path` was probably meant to be: a sibling, the same name elsewhere, a similar path."""
        parent, _, name = path.rpartition(".")
        siblings = [known.rpartition(".")[2] for known in (*self.leaves, *self.sections) if _parent(known) == parent]
        if close := get_close_matches(name, siblings, n=1, cutoff=0.7):
            return f"{parent}.{close[0]}" if parent else close[0]
        parts = path.split(".")
        for start in range(len(parts)):
            tail = "." + ".".join(parts[start:])
            if elsewhere := [leaf for leaf in self.leaves if leaf.endswith(tail)]:
                return max(elsewhere, key=lambda leaf: (_shared_parts(leaf, path), -len(leaf)))
        return next(iter(get_close_matches(path, self.leaves, n=1, cutoff=0.85)), None)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted paths into a tree."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _walk(cls: type, defaults: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, bool]]:
    hints = get_type_hints(cls)
    for key in fields(cls):
        path, kind = prefix + key.name, hints[key.name]
        nested = is_dataclass(kind)
        yield path, defaults[key.name], nested
        if nested:
            yield from _walk(kind, defaults[key.name], path + ".")


def _defaults(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {key.name: _default(key, hints[key.name]) for key in fields(cls)}


def _default(key: Field[Any], kind: Any) -> Any:
    if key.default is not MISSING:
        return key.default
    if key.default_factory is not MISSING:
        value = key.default_factory()
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return _defaults(kind) if isinstance(kind, type) and is_dataclass(kind) else MANDATORY


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _shared_parts(one: str, other: str) -> int:
    matches = SequenceMatcher(None, one.split("."), other.split(".")).get_matching_blocks()
    return sum(block.size for block in matches)
