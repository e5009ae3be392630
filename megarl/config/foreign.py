"""Keys and values of other trainers, as `foreign.yaml` lists them.

An alias is read as the key of megarl. A key without a choice is accepted with its one value and dropped, so that no
section has a field that nothing reads. Any other foreign key gets a fault that says what to write instead, or that the
feature is not supported.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megarl.config.links import parse


@dataclass(frozen=True, kw_only=True)
class ForeignRow:
    """Keys, and what is said about them."""

    keys: list[str]  # patterns of paths
    answer: str = ""
    accepts: Sequence[Any] = ()  # the values without effect, of keys without a choice
    refuses: Sequence[Any] = ()  # the values to answer, of keys that megarl has

    def matches(self, path: str) -> bool:
        """Return whether the row is about the key at `path`."""
        return any(fnmatchcase(path, pattern) for pattern in self.keys)

    def say(self, path: str, value: object) -> str:
        """Return the answer to a key and its value."""
        return self.answer.format(owner=owner_of(path), value=value)


_TABLES = parse(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))
ALIASES: Mapping[str, str] = _TABLES["aliases"]
FLAGS: Mapping[str, str] = _TABLES["flags"]
FIXED, KEYS, VALUES = ([ForeignRow(**row) for row in _TABLES[name]] for name in ("fixed", "keys", "values"))


def alias(path: str) -> str:
    """Return `path` with an alias at its end replaced by the name here."""
    parent, dot, name = path.rpartition(".")
    return f"{parent}{dot}{ALIASES.get(name, name)}"


def answer_key(path: str, value: object) -> str | None:
    """Return what to write instead of a key; empty if it is accepted with `value`, None if no other trainer has it.

    A value that follows another key (`${...}`) is accepted: the other key is checked itself.
    """
    fixed = _first(FIXED, path)
    if fixed:
        if any(value == one and type(value) is type(one) for one in fixed.accepts) or str(value).startswith("${"):
            return ""
        if fixed.answer:
            return fixed.say(path, value)
    if path in FLAGS:
        return f"write {FLAGS[path]}"
    row = _first(KEYS, path)
    if row:
        return row.say(path, value)
    return f"is not supported: write {str(fixed.accepts[0]).lower()}" if fixed else None


def answer_values(path: str, value: object) -> Iterator[str]:
    """Yield what to write instead of each foreign value at `path`; a list is checked item by item."""
    for item in value if isinstance(value, list) else [value]:
        yield from (row.say(path, item) for row in VALUES if item in row.refuses and row.matches(path))


def owner_of(path: str) -> str:
    """Return the section of the model that `path` belongs to, with a dot; empty if there is none."""
    for owner in ("actor_rollout_ref.ref.", "critic.", "reward_model."):
        if path.startswith(owner):
            return owner
    return "actor_rollout_ref.actor." if path.startswith("actor_rollout_ref.") else ""


def _first(rows: Iterable[ForeignRow], path: str) -> ForeignRow | None:
    return next((row for row in rows if row.matches(path)), None)
