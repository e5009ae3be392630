"""The tree of keys under a root section: paths, defaults, marks, and the path that a misspelt path was meant to be."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache, partial
from typing import Any, get_type_hints

from megarl.mark import UNKNOWN, Change, Condition

MOST_ELSEWHERE = 2
"""Most sections that may share a key's name, if the name alone is to be understood."""
MANDATORY = "???"  # the mark of a key that has no value yet


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Every key under one root."""

    leaves: dict[str, object]  # dotted path -> default, or MANDATORY
    sections: set[str]  # dotted paths of the sections between root and leaves
    changes: dict[str, Change]  # of the leaves: what another value does to a run that resumes
    read_if: dict[str, tuple[Condition, ...]]  # of leaves and sections, the conditions of outer sections first

    @staticmethod
    def of(root: type) -> "Schema":
        """Return the schema of the dataclass `root`, which is walked once in a process."""
        return _schema(root)

    def _walk(self, cls: type, section: object, prefix: str, outer: tuple[Condition, ...]) -> None:
        """Add the keys of `cls`; their defaults are the values of `section`, if that is an instance."""
        hints = get_type_hints(cls)
        for key in fields(cls):
            path = prefix + key.name
            kind = hints[key.name]
            default = getattr(section, key.name) if isinstance(section, cls) else _default(key)
            own = (one.at(prefix, path) for one in key.metadata.get("read_if", ()))
            conditions = (*outer, *own)
            self.read_if[path] = tuple(one for one in conditions if one.concerns(path))
            is_section = is_dataclass(kind)  # a variable, because mypy takes the call for a test of the type
            if is_section:
                self.sections.add(path)
                self._walk(kind, default, f"{path}.", conditions)
            else:
                self.leaves[path] = default
                self.changes[path] = key.metadata.get("change") or getattr(cls, "__change__", None) or UNKNOWN

    def leaf(self, path: str) -> str:
        """Return the key that `path` is, or is a part of."""
        while path not in self.leaves:
            path = _parent(path)
            assert path, "no key is there"
        return path

    def __contains__(self, path: str) -> bool:
        return path in self.leaves or path in self.sections

    def nearest(self, path: str) -> str | None:
        """Return the key that was meant: a similar name in the section of `path`, or the same name elsewhere."""
        parent, _, name = path.rpartition(".")
        siblings = [known.rpartition(".")[2] for known in (*self.leaves, *self.sections) if _parent(known) == parent]
        close = get_close_matches(name, siblings, n=1, cutoff=0.7)
        if close:
            return f"{parent}.{close[0]}" if parent else close[0]
        parts = path.split(".")
        for start in range(len(parts)):
            tail = "." + ".".join(parts[start:])
            elsewhere = [leaf for leaf in self.leaves if leaf.endswith(tail)]
            related = [leaf for leaf in elsewhere if set(leaf.split(".")[:-1]) & set(parts[:-1])]
            if related or 0 < len(elsewhere) <= MOST_ELSEWHERE:
                return max(related or elsewhere, key=partial(_likeness, path))
        return None


@cache
def _schema(root: type) -> Schema:
    schema = Schema(leaves={}, sections=set(), changes={}, read_if={})
    schema._walk(root, None, "", ())
    return schema


def nest(leaves: Mapping[str, object]) -> dict[str, object]:
    """Turn dotted paths into a tree."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _default(key: Field[object]) -> object:
    if key.default_factory is not MISSING:
        return key.default_factory()
    return MANDATORY if key.default is MISSING else key.default


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _likeness(path: str, leaf: str) -> tuple[int, bool, int]:
    """Prefer the leaf with most parts of the path, then the policy's, then the shortest."""
    matches = SequenceMatcher(None, leaf.split("."), path.split(".")).get_matching_blocks()
    return sum(block.size for block in matches), leaf.startswith("actor_rollout_ref."), -len(leaf)
