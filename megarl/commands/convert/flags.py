"""Flags of trainers with an argument parser, and their YAML, by the tables in `megarl/config/trainers`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import megarl.config
from megarl.commands.convert.expand import UNKNOWN, links
from megarl.commands.convert.launch import Launched
from megarl.config.foreign import Remark
from megarl.config.layers import UNREADABLE
from megarl.config.links import parse
from megarl.section import flatten

if TYPE_CHECKING:
    from megarl.commands.convert.translate import Converted

TABLES = Path(megarl.config.__file__).with_name("trainers")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The keys here for the flags of a trainer."""

    name: str
    source: str  # repository and commit
    date: str
    programs: Sequence[str]  # patterns of the program
    needs: Sequence[str] = ()  # flags that identify a launch, if the name of its program does not
    roots: Sequence[str] = ()  # sections of a YAML file
    sets: Mapping[str, Any] = field(default_factory=dict)  # the defaults of the trainer that train differently
    brings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # a flag that is on -> more of these defaults
    only_with: Mapping[str, str] = field(default_factory=dict)  # a pattern of flags -> the one without which they rest
    same: Mapping[str, str] = field(default_factory=dict)  # a flag -> the key here
    dropped: Mapping[str, str] = field(default_factory=dict)  # a flag -> why it changes nothing
    decide: Mapping[str, str] = field(default_factory=dict)  # a flag -> what there is to decide

    @classmethod
    def of(cls, launched: Launched) -> Self | None:
        """Return the table for the program of a launch; None for verl and what is like it."""
        flags = {flag for flag, _ in pairs(launched.words)}
        fitting = (table for table in cls.tables() if any(fnmatchcase(launched.program, one) for one in table.programs))
        return next((table for table in fitting if not table.needs or flags & set(table.needs)), None)

    @classmethod
    def of_file(cls, tree: Mapping[str, Any]) -> Self | None:
        """Return the table for a YAML file; None for verl and what is like it."""
        return next((table for table in cls.tables() if table.roots and tree.keys() >= set(table.roots)), None)

    @classmethod
    @cache
    def tables(cls) -> list[Self]:
        """Return all tables."""
        return [cls(**parse(path.read_text(encoding="utf-8"))) for path in sorted(TABLES.glob("*.yaml"))]

    def fill(self, found: "Converted", words: Sequence[str]) -> None:
        """Add what the flags say to `found`."""
        given = {flag: _parsed(text) for flag, text in pairs(words)}
        defaults = {**self.sets}
        for flag, keys in self.brings.items():
            defaults |= keys if given.get(flag) else {}
        found.keep(defaults, [])
        found.comments.update(dict.fromkeys(defaults, f"the default of {self.name}"))
        for flag, text in pairs(words):
            written = f"{flag}={text}"
            if UNKNOWN in text:
                found.decisions[written.replace(UNKNOWN, "$(...)")] = "only the script can tell the value: write it"
                continue
            value = _parsed(links(text))
            switch = next((one for pattern, one in self.only_with.items() if fnmatchcase(flag, pattern)), flag)
            if flag != switch and not given.get(switch):
                found.dropped[written] = f"is read only with {switch}"
            elif flag in self.same:
                key = self.same[flag]
                found.comments.pop(key, None)
                found.keep({key: value}, [Remark(written=flag, value=value, key=key, why="")])
            elif flag in self.dropped:
                found.dropped[written] = self.dropped[flag]
            else:
                found.decisions[written] = self.decide.get(flag, "no key here is known to mean this")


def _parsed(text: str) -> Any:
    try:
        return parse(text)
    except UNREADABLE:
        return text


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags with their values: `true` for a flag without one, a list for one with several."""
    flag, values = "", list[str]()
    for word in (*words, "--"):
        key, is_given, value = word.partition("=")
        ends = word.startswith("--") or (is_given and "." in key)
        if not ends:
            values.append(word)
            continue
        if flag:
            yield flag, values[0] if len(values) == 1 else f"[{', '.join(values)}]" if values else "true"
        flag, values = "", []
        if not word.startswith("--"):
            yield key.lstrip("+"), value
        elif word != "--":
            flag, values = key[2:].replace("-", "_"), [value] if is_given else []


def words_of(tree: Mapping[str, Any]) -> list[str]:
    """Return the leaves of a YAML file as words."""
    return [f"--{key}={json.dumps(value)}" for key, value in flatten(tree)]
