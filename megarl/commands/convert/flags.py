"""Flags of trainers with an argument parser, and their YAML, by the tables in `megarl/config/trainers`."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeGuard

import megarl.config
from megarl.commands.convert.converted import Converted
from megarl.commands.convert.expand import UNKNOWN, after_marks, links
from megarl.commands.convert.inherit import resolved, tree_of
from megarl.commands.convert.launch import Launched
from megarl.config.foreign import ANY, Remark
from megarl.config.links import UNREADABLE, parse, shown
from megarl.config.load import merged_trees
from megarl.config.schema import nest

TABLES = Path(megarl.config.__file__).with_name("trainers")
PER_PROMPT = "actor_rollout_ref.rollout.n"
Meaning = Mapping[str, object] | str
"""Keys of megarl with values, "{value}" for that of the flag and "{0}" for its first item; or the reason for none."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The keys here for the flags of a trainer."""

    name: str
    source: str  # repository and commit
    date: str
    programs: Sequence[str]  # patterns of the program
    needs: Sequence[str] = ()  # flags that identify a launch, if the name of its program does not
    roots: Sequence[str] = ()  # sections that only its YAML files have
    sets: Mapping[str, object] = field(default_factory=dict)  # the defaults of the trainer that train differently
    older: Mapping[str, str] = field(default_factory=dict)  # a former name of a flag -> its name in the tables
    same: Mapping[str, str] = field(default_factory=dict)  # a flag -> the key here, or key[1] for an item of its list
    sections: Mapping[str, str] = field(default_factory=dict)  # a section of flags -> the key here, a mapping
    cases: Mapping[str, Mapping[object, Meaning]] = field(default_factory=dict)
    """A flag -> a value -> what it means here."""
    samples: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """A size in prompts here -> the flags whose product it is in samples there, with their defaults."""
    quotients: Mapping[str, Sequence[str]] = field(default_factory=dict)  # a key here -> a flag and that of its divisor
    lengths: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The flag of the tokens that a prompt and its response share -> a key here -> the flag of its own limit."""
    file: str = ""  # the flag of a YAML file, whose flags the others override
    default_files: Mapping[str, str] = field(default_factory=dict)
    """A pattern of programs -> the file that counts without this flag."""
    idle: Mapping[str, Sequence[object]] = field(default_factory=dict)  # a flag -> the values that ask for nothing
    dropped: Mapping[str, str] = field(default_factory=dict)  # a pattern of flags -> why they change nothing
    unused: Mapping[str, str] = field(default_factory=dict)  # a pattern of flags -> the switch that they would need
    decide: Mapping[str, str] = field(default_factory=dict)  # a pattern -> what there is to decide about other values
    when: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """flag=value -> what it changes in the tables; the last row decides."""

    @classmethod
    def of(cls, launched: Launched) -> Self | None:
        """Return the table for the program of a launch; None for verl and what is like it."""
        flags = {flag for flag, _ in pairs(launched.words)}
        fitting = (table for table in cls.tables() if any(fnmatchcase(launched.program, one) for one in table.programs))
        return next((table for table in fitting if not table.needs or flags & set(table.needs)), None)

    @classmethod
    def of_file(cls, tree: Mapping[str, object]) -> Self | None:
        """Return the table for a YAML file; None for verl and what is like it."""
        return next((table for table in cls.tables() if tree.keys() & set(table.roots)), None)

    @classmethod
    @cache
    def tables(cls) -> list[Self]:
        """Return all tables."""
        return [cls(**parse(path.read_text(encoding="utf-8"))) for path in sorted(TABLES.glob("*.yaml"))]

    def read_file(self, found: Converted, launched: Launched, base: Path) -> Sequence[str]:
        """Return the flags of the YAML file that a launch names, and then its words; `found` says that it was read.

        The script is in the directory `base`. A file that is not there remains among the words.
        """
        given = dict(pairs(launched.words))
        name = given.get(self.file) or _first(self.default_files, launched.program)
        if not name:
            return launched.words
        path = find_file(name, base)
        tree = tree_of(path) if path else None
        if tree is None:
            return [*launched.words, f"--{self.file}={name}"]
        given.pop(self.file, None)
        found.dropped[f"{self.file}={links(name).replace(UNKNOWN, '$(...)')}"] = "its keys are in this file"
        for flag, text in given.items():
            tree = merged_trees(tree, nest({flag: _parsed(links(text))}))  # links of the file lead to them
        return [*words_of(tree), *(f"--{flag}={text}" for flag, text in given.items())]

    def fill(self, found: Converted, words: Sequence[str]) -> None:
        """Add what the flags say to `found`."""
        texts = {
            flag: found.named(self.same.get(self.older.get(flag, flag)), text)
            for flag, text in dict(pairs(words)).items()
        }
        values = {flag: _parsed(links(text)) for flag, text in texts.items()}
        given = {self.older.get(flag, flag): value for flag, value in values.items() if UNKNOWN not in texts[flag]}
        table = self._adapted(given)
        found.keep(table.sets, [])
        found.comments.update(dict.fromkeys(table.sets, f"the default of {self.name}"))
        decided = {}
        for flag, value in values.items():
            name = self.older.get(flag, flag)
            meaning = table.meaning(name, value)
            if isinstance(meaning, str):
                found.dropped[f"{flag}={texts[flag]}".replace(UNKNOWN, "$(...)")] = meaning
            elif name not in given:
                decided[flag] = "only the script can tell the value: write it"
            elif meaning is None:
                decided[flag] = _first(table.decide, name) or "no key here is known to mean this"
            else:
                for key, one in meaning.items():
                    _keep(found, key, one, flag)
        counted = {*table.count(found, given), *table.divide(found, given), *table.limit(found, given)}
        for flag, why in decided.items():
            if self.older.get(flag, flag) not in counted:
                found.decisions[f"{flag}={texts[flag]}".replace(UNKNOWN, "$(...)")] = why

    def meaning(self, flag: str, value: object) -> Meaning | None:
        """Return what a flag means here; None if that is to be decided."""
        text = shown(value)
        if text in map(shown, self.idle.get(flag, ())):
            return "changes nothing here"
        why = _first(self.unused, flag)
        if why:
            return why
        if flag in self.same:
            return {self.same[flag]: value}
        for section, key in self.sections.items():
            if flag.startswith(f"{section}."):
                return {key: nest({flag.removeprefix(f"{section}."): value})}
        cases = {shown(case): meaning for case, meaning in self.cases.get(flag, {}).items()}
        meaning = cases.get(text, cases.get(ANY))
        if isinstance(meaning, Mapping):
            return {key: _inserted(one, value) for key, one in meaning.items()}
        if meaning or value is None:
            return meaning or "null asks for nothing"
        if flag in (*self.cases, *self.idle, *self.decide):
            return None
        return _first(self.dropped, flag)

    def count(self, found: Converted, given: Mapping[str, Any]) -> Iterator[str]:
        """Add the sizes that count samples there, and yield their flags."""
        per_prompt = found.leaves.get(PER_PROMPT, 1)
        for key, flags in self.samples.items():
            sizes = [given.get(flag, default) for flag, default in flags.items()]
            written = ", ".join(f"{flag}={given[flag]}" for flag in flags if flag in given)
            is_known = not written and key in found.leaves
            if None in sizes or is_known:
                continue
            yield from flags
            are_counts = all(isinstance(size, int) and size > 0 for size in (*sizes, per_prompt))
            if are_counts and math.prod(sizes) % per_prompt == 0:
                _keep(found, key, math.prod(sizes) // per_prompt, written)
                found.comments[key] = f"was {written}" if written else f"the default of {self.name}"
            else:
                found.decisions[written] = f"counts samples, {per_prompt} of a prompt: write {key} in prompts"

    def divide(self, found: Converted, given: Mapping[str, Any]) -> Iterator[str]:
        """Add the quotients of flags, and yield these flags; counts that leave a rest remain to be decided."""
        for key, (flag, divisor) in self.quotients.items():
            number = given.get(flag)
            by = given.get(divisor)
            if not (_is_number(number) and _is_number(by) and by > 0):
                continue
            are_counts = isinstance(number, int) and isinstance(by, int)
            leaves_rest = are_counts and number % by
            if not leaves_rest:
                _keep(found, key, number // by if are_counts else number / by, f"{flag}={number}, {divisor}={by}")
                yield from (flag, divisor)

    def limit(self, found: Converted, given: Mapping[str, Any]) -> Iterator[str]:
        """Add the limits of prompt and response, and yield their flags, and the flag of both if they fit into it."""
        for flag, parts in self.lengths.items():
            numbers = {key: part for key, part in parts.items() if _is_number(given.get(part))}
            if not _is_number(given.get(flag)):
                continue
            own = {key: given[part] for key, part in numbers.items() if given[part] < given[flag]}
            for key, part in numbers.items():
                if key in own:
                    _keep(found, key, own[key], part)
                else:
                    found.dropped[f"{part}={given[part]}"] = f"limits nothing: {flag} is no more"
            yield from numbers.values()
            if len(own) == len(parts) and sum(own.values()) <= given[flag]:
                yield flag

    def _adapted(self, given: Mapping[str, object]) -> "Flags":
        """Return the tables as the flags that change the meaning of others have them."""
        tables: dict[str, Any] = {}
        written = {f"{flag}={shown(value)}" for flag, value in given.items()}
        for _, changed in (row for row in self.when.items() if row[0] in written):
            for name, changes in changed.items():
                tables[name] = {**tables.get(name, getattr(self, name)), **changes}
        return replace(self, **tables)


def find_file(name: str, base: Path) -> Path | None:
    """Return the file that a script in the directory `base` names; None if it is not there.

    A name that begins with what only the script can tell, or that has a folder, is searched in the directories above
    `base` too.
    """
    known = after_marks(name)
    known = known.lstrip("/") if known != name else known
    if not known:
        return None
    folders = [base.resolve()]
    if "/" in known:
        folders += base.resolve().parents
    places = (folder / known for folder in (*folders, Path()))
    return next((place for place in places if place.is_file()), None)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first(table: Mapping[str, str], flag: str) -> str | None:
    return next((text for pattern, text in table.items() if fnmatchcase(flag, pattern)), None)


def _keep(found: Converted, key: str, value: object, flag: str) -> None:
    """Add a key, or an item of its list."""
    key, _, index = key.partition("[")
    if index:
        items = [*found.leaves[key]]
        items[int(index.removesuffix("]"))] = value
        value = items
    if found.comments.get(key, "").startswith("the default of"):
        del found.comments[key]
    found.keep({key: value}, [Remark(flag, value, key, "")])


def _inserted(template: object, value: Any) -> object:
    """Return a value of a case, with the value of the flag or an item of it."""
    if isinstance(template, dict):
        return {key: _inserted(one, value) for key, one in template.items()}
    match = re.fullmatch(r"\{(value|\d)}", template) if isinstance(template, str) else None
    if not match:
        return template
    is_item = match[1].isdigit() and isinstance(value, list) and int(match[1]) < len(value)
    return value[int(match[1])] if is_item else value


def _parsed(text: str) -> object:
    try:
        return parse(text)
    except UNREADABLE:
        return text


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags with their values: `true` for a flag without one and for other words, a list for several values."""
    flag = ""
    values = list[str]()
    for word in (*words, "--"):
        key, is_given, value = word.partition("=")
        ends = word.startswith(("--", "~")) or (is_given and "." in key)
        if not ends and flag:
            values.append(word)
            continue
        if flag:
            several = f"[{', '.join(values)}]" if values else "true"
            yield flag, values[0] if len(values) == 1 else several
        flag = ""
        values = []
        if not word.startswith("--"):
            yield key.lstrip("+"), value if is_given else "true"
        elif word != "--":
            flag = key[2:].replace("-", "_")
            values = [value] if is_given else []


def words_of(tree: Mapping[str, object]) -> list[str]:
    """Return the leaves of a YAML file as words."""
    return [f"--{key}={value if UNKNOWN in str(value) else json.dumps(value)}" for key, value in resolved(tree)]
