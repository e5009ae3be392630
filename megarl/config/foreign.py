"""Keys and values of other trainers, as `foreign.yaml` lists them.

A key that has another name here is read as that key. A key that changes nothing here is accepted and dropped, so that
no section has a field that nothing reads. Both are reported. Any other foreign key gets a fault that says what to write
instead, or that the feature is missing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from megarl.config.links import parse, shown
from megarl.config.schema import Schema

_MISSING = "is not supported"
ANY = "any"  # in `accepts`: whatever the value
_OTHER_KEYS = re.compile(r"(?:\$\{(?!\s*oc\.env:)[^{}]*\}[^${}]*)+")


@dataclass(frozen=True, kw_only=True)
class ForeignRow:
    """Keys, and what is said about them."""

    keys: list[str]  # patterns of paths
    answer: str = ""
    missing: bool = False  # whether megarl lacks what the key asks for
    accepts: Sequence[object] = ()  # the values without effect, of keys without a choice
    why: str = ""  # why these values change nothing
    least: Sequence[str] = ()  # the keys whose sum is the least of these values; `answer` is for smaller ones
    unless: str = ""  # the key that lets any value do if it is true; if it is not, only the sum of `least` does
    refuses: Sequence[object] = ()  # the values to answer, of keys that megarl has
    group: str = ""  # of the entry points under which an installed package may offer a value
    becomes: Mapping[object, object] = field(default_factory=dict)  # the values that have another name here
    to: str = ""  # the key here; {rest} is the part behind a pattern that ends in a star
    defaults: Mapping[str, object] = field(default_factory=dict)  # verl's, of keys here, if this key is written
    also: Mapping[str, object] = field(default_factory=dict)  # the keys here that this key implies
    scale: float = 1.0  # of the value here, to that there
    most: float | None = None  # the largest value here, which means the same as any larger one

    def matches(self, path: str) -> bool:
        """Return whether the row is about the key at `path`."""
        return any(fnmatchcase(path, pattern) for pattern in self.keys)

    def does_refuse(self, value: object) -> bool:
        """Return whether megarl lacks a value, and no installed package offers it."""
        return _among(value, self.refuses) and not self._is_offered(value)

    def _is_offered(self, value: object) -> bool:
        return value in entry_points(group=self.group).names

    def answer_to(self, path: str, value: object) -> str:
        """Return the answer to a key and its value."""
        return self.answer.format(owner=owner_of(path), value=value)

    def target(self, path: str) -> str:
        """Return the key here."""
        pattern = next(pattern for pattern in self.keys if fnmatchcase(path, pattern))
        rest = path[len(pattern) - 1 :] if pattern.endswith("*") else ""
        return self.to.format(owner=owner_of(path), rest=rest)

    def value_here(self, value: object) -> object:
        """Return a value, or each item of a list, as it is written here. A list names no item twice by this."""
        if isinstance(value, list):
            here = [(item, self.value_here(item)) for item in value]
            return [new for item, new in here if new == item or new not in value]
        if _among(value, self.becomes) and not self._is_offered(value):
            return self.becomes[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        bounded = self.most if self.most is not None and value > self.most else value
        return bounded * self.scale if self.scale != 1.0 else bounded

    def drops(self, value: object) -> bool:
        """Return whether a value asks for nothing; one that follows another key is checked there."""
        return ANY in self.accepts or _among(value, self.accepts) or bool(_OTHER_KEYS.fullmatch(str(value)))


@dataclass(frozen=True)
class Remark:
    """An accepted key of another trainer, and the key here."""

    written: str
    value: object
    key: str | None  # the key here; None: it was dropped
    why: str  # that it changes nothing, or how its value is written here
    row: ForeignRow | None = None  # that decided

    def answer(self, values: Mapping[str, object]) -> str | None:
        """Return the answer to a value that the `values` of other keys forbid."""
        row = self.row
        if row is None or not row.least or not isinstance(self.value, int):
            return None
        sizes = [values.get(key) for key in row.least]
        numbers = [size for size in sizes if isinstance(size, int)]
        least = sum(numbers)
        does = (values.get(row.unless) or self.value == least) if row.unless else self.value >= least
        if does or len(numbers) < len(sizes):
            return None
        return row.answer.format(least=least)


@dataclass(frozen=True)
class Reading:
    """A key and its value as megarl has them, or the reason why it does not."""

    leaves: dict[str, object] = field(default_factory=dict)
    remark: Remark | None = None
    answer: str = ""  # what to write instead
    missing: bool = False  # whether megarl lacks what the key asks for
    known: bool = True  # whether megarl or the tables have the key


_TABLES: Mapping[str, Any] = parse(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))
ALIASES: Mapping[str, str] = _TABLES["aliases"]
FLAGS: Mapping[str, str] = _TABLES["flags"]
FIXED, RENAMES, KEYS, VALUES = (
    [ForeignRow(**row) for row in _TABLES[name]] for name in ("fixed", "renames", "keys", "values")
)
ENGINES: Sequence[str] = _TABLES["engines"]
CONFIGS: Sequence[str] = _TABLES["configs"]
DEFAULTS: Mapping[str, object] = _TABLES["defaults"]
ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
IS_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
RS_THRESHOLD = "algorithm.rollout_correction.rollout_rs_threshold"


def read_key(written: str, value: object, known: Schema) -> Reading:
    """Return a key and its value in the names of megarl, whose keys and sections are `known`."""
    if written in known:
        return _read_value(written, value, Reading())
    parent, dot, name = written.rpartition(".")
    alias = f"{parent}{dot}{ALIASES.get(name, name)}"
    if alias in known:
        return _read_value(alias, value, Reading(remark=Remark(written, value, alias, "")))
    fixed = _first(FIXED, written)
    if fixed and fixed.drops(value):
        why = (fixed.why or "changes nothing here").format(owner=owner_of(written), value=value)
        return Reading(remark=Remark(written, value, None, why, fixed))
    renamed = _first(RENAMES, written)
    has_answer = fixed is not None and fixed.answer
    if renamed and renamed.target(written) in known and not has_answer:
        target = renamed.target(written)
        ours = renamed.value_here(value)
        why = renamed.why if ours != value or renamed.also else ""
        reading = _read_value(target, ours, Reading(remark=Remark(written, value, target, why, renamed)))
        return replace(reading, leaves={**reading.leaves, **renamed.also})
    return _answer(written, value, fixed)


def _read_value(key: str, value: object, reading: Reading) -> Reading:
    """Add a value, in the words of megarl, to the reading of a key that megarl has."""
    remark = reading.remark
    if isinstance(value, dict):
        return _read_mapping(key, value, remark)
    if key in (IS_THRESHOLD, RS_THRESHOLD) and isinstance(value, str):
        return _two_bounds(key, value)
    answers = list[str]()
    missing = False
    for row in VALUES:
        if not row.matches(key):
            continue
        for item in value if isinstance(value, list) else [value]:
            if row.does_refuse(item):
                answers.append(row.answer_to(key, item))
                missing = missing or row.missing
        new = row.value_here(value)
        if new != value or type(new) is not type(value):
            why = row.why.format(value=value) or f"{shown(value)} is {shown(new)} here"
            remark = Remark(remark.written if remark else key, value, key, why)
            value = new
    return Reading({key: value}, remark, answer="; ".join(answers), missing=missing)


def _read_mapping(key: str, value: dict[str, object], remark: Remark | None) -> Reading:
    """Return a mapping without the keys that change nothing, and the engine's without the level of its name."""
    others = [name for name in value if name in ENGINES]
    if key == ENGINE_KWARGS and others:
        of_vllm = value.get("vllm")
        own = {name: one for name, one in value.items() if name not in ENGINES}
        own |= of_vllm if isinstance(of_vllm, dict) else {}
        why = f"the engine is vLLM: {', '.join(others)} is no level here, and arguments of other engines are dropped"
        return Reading({key: own}, Remark(key, value, key, why))
    idle = dict[str, ForeignRow]()
    for name, one in value.items():
        row = _first(FIXED, f"{key}.{name}")
        if row and row.drops(one):
            idle[name] = row
    if idle:
        why = next(iter(idle.values())).why
        remark = Remark(", ".join(f"{key}.{name}" for name in idle), value, None, why)
    return Reading({key: {name: one for name, one in value.items() if name not in idle}}, remark)


def _two_bounds(key: str, value: str) -> Reading:
    """Return the bounds of train/rollout for `lower_upper` of weights, or of the rollout/train that is kept."""
    try:
        bounds = [float(part) for part in value.split("_")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 2 or min(bounds) <= 0.0:
        return Reading({key: value})  # its type is a fault
    if key == IS_THRESHOLD:
        leaves: dict[str, object] = {key: bounds[-1]}
        if len(bounds) == 2:
            leaves[f"{key}_lower"] = bounds[0]
        why = f"each of the bounds {value} has a key here"
        return Reading(leaves, Remark(key, value, key, why))
    upper = 1 / bounds[0] if len(bounds) == 2 else bounds[0]
    lower = 1 / bounds[-1]
    why = f"{value} bounds rollout/train there; here the ratio is train/rollout, so each bound is 1 / the other one"
    leaves = {key: float(f"{upper:.12g}"), f"{key}_lower": float(f"{lower:.12g}")}
    return Reading(leaves, Remark(key, value, key, why))


def defaults_beside(remarks: Iterable[Remark]) -> dict[str, object]:
    """Return verl's defaults that train differently from those of megarl, for a run with the keys of `remarks`."""
    defaults = dict(DEFAULTS)
    for remark in remarks:
        if remark.row:
            defaults |= remark.row.defaults
    return defaults


def _answer(path: str, value: object, fixed: ForeignRow | None) -> Reading:
    """Return what to write instead of a key that megarl does not have."""
    if fixed and fixed.answer:
        answer = fixed.answer_to(path, value)
        return Reading(answer=answer, missing=fixed.missing or answer.startswith(_MISSING))
    if path in FLAGS:
        return Reading(answer=f"write {FLAGS[path]}")
    row = _first(KEYS, path)
    if row:
        answer = row.answer_to(path, value)
        return Reading(answer=answer, missing=row.missing or answer.startswith(_MISSING))
    if fixed:
        return Reading(answer=f"{_MISSING}: write {shown(fixed.accepts[0])}", missing=True)
    return Reading(known=False)


def owner_of(path: str) -> str:
    """Return the section of the model that `path` belongs to, with a dot; empty if there is none."""
    for owner in ("actor_rollout_ref.ref.", "critic.", "reward_model."):
        if path.startswith(owner):
            return owner
    return "actor_rollout_ref.actor." if path.startswith("actor_rollout_ref.") else ""


def answer_flag(flag: str) -> str | None:
    """Return the key that does what a flag of another trainer does, if it is known."""
    return FLAGS.get(flag.lstrip("-").partition(" ")[0])


def remarks_in_words(remarks: Sequence[Remark]) -> Iterator[str]:
    """Yield a sentence for the renamed keys, and one for each reason why others were dropped."""
    renamed = {f"{one.written} is {one.key}": None for one in remarks if one.key and not one.why}
    if renamed:
        yield f"keys of other trainers that have another name here: {', '.join(renamed)}"
    for why in dict.fromkeys(one.why for one in remarks if one.why):
        keys = dict.fromkeys(_written(one) for one in remarks if one.why == why)
        yield f"{', '.join(keys)}: {why}"


def _written(remark: Remark) -> str:
    return remark.written if isinstance(remark.value, dict | list) else f"{remark.written}={shown(remark.value)}"


def _first(rows: Iterable[ForeignRow], path: str) -> ForeignRow | None:
    return next((row for row in rows if row.matches(path)), None)


def _among(value: object, values: Iterable[object]) -> bool:
    return any(value == one and type(value) is type(one) for one in values)
