"""Converts SentencePiece's normalisation table to a normalizer that rewrites every text as SentencePiece does.

SentencePiece replaces the longest key of the table at each place. `tokenizers` has a normalizer that reads the table,
but it replaces a grapheme (a letter with its marks) by the value of the shortest key at its start, so it drops marks.
The steps here show it one character at a time:

1. `JOINT` goes between two characters of one key, and `CUT` between any others that could be one grapheme.
2. The table rewrites the characters, and the joints vanish.
3. Unicode's composition (NFC) joins what no cut separates: the value of a key of several characters is the composition
   of the values of its characters. The few other keys are replaced on their own.
4. The cuts vanish.

Some characters have another value alone than in a key: under case folding U+0345 alone becomes a letter. They are
hidden from the table after a joint.

A few vowel signs of Unicode 16 (Kirat Rai, Gurung Khema, Tulu-Tigalari) begin some keys and continue others: of several
in a row another key may be replaced first.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from tokenizers import Regex, normalizers

from megarl.platform.errors import UserError

JOINT = "\U0010fffe"
CUT = "\U0010ffff"
"""With `JOINT` and `_STAND_INS` code points that Unicode reserves for the inside of programs; no text has them."""
_STAND_INS = [chr(0x10000 * plane + 0xFFFF) for plane in range(1, 9)]
_MOST_EXCEPTIONS = 256
_CHARACTERS = [*map(chr, range(1, 0xD800)), *map(chr, range(0xE000, 0x40000))]
"""All characters that Unicode's composition may change, and more."""
_CUTS = rf"(?!\A)(?<!{JOINT})(?:(?=[^\x00-\x7f{JOINT}])|(?<=[^\x00-\x7f])(?=[\x00-\x7f])|(?<=\r)(?=\n))"


@lru_cache(maxsize=8)
def table_normalizer(table: bytes) -> normalizers.Normalizer:
    """Return a normalizer that rewrites a text as SentencePiece does by a `precompiled_charsmap`.

    Raises:
        UserError: no normalizer expresses the rules of the table.
    """
    rules, joints = _read(table)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(_CUTS), CUT), normalizers.Precompiled(table)]
    later = later_characters(table)
    if later:
        places = "|".join(f"(?<={before})(?={after})" for before, after in joints)
        steps.insert(0, normalizers.Replace(Regex(f"(?={_class(later)})(?:{places})"), JOINT))
        composition = _Composition.of(rules)
        steps[2:2] = composition.before_the_table(rules)
        steps += composition.after_the_table()
    return normalizers.Sequence([*steps, normalizers.Replace(CUT, "")])


def later_characters(table: bytes) -> frozenset[str]:
    """Return the characters that continue a key of a `precompiled_charsmap`, which may be empty."""
    return frozenset(character for key in _read(table)[0] for character in key[1:])


@lru_cache(maxsize=8)
def _read(table: bytes) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the keys of a table with their values, and the places between the characters of keys."""
    if not table:
        return {}, []
    keys = _Keys(table)
    return dict(keys.rules()), list(keys.joints())


@dataclass(frozen=True)
class _Composition:
    """How the values of keys of several characters are made from the values of the characters."""

    hidden: dict[str, str]  # a character that keeps its form in keys -> its stand-in
    exceptions: list[str]  # keys whose value is made otherwise
    is_needed: bool = True  # False: all keys of several characters are exceptions

    @classmethod
    def of(cls, rules: dict[str, str]) -> "_Composition":
        """Compare all rules. Raises UserError if many have a value that no composition makes."""
        whole = [key for key in rules if len(key) > 1]
        values = str.maketrans({key: value for key, value in rules.items() if len(key) == 1})
        composition = cls({}, whole, is_needed=False)
        if len(whole) > _MOST_EXCEPTIONS:
            missed = cls({}, []).missed(rules, values)
            kept = {character for key in missed for character in key[1:] if character in rules}
            hidden = dict(zip(sorted(kept), _STAND_INS, strict=False))
            if hidden:
                missed = cls(hidden, []).missed(rules, values)
            composition = cls(hidden, missed)
        results = CUT.join(rules[key] for key in composition.exceptions)
        if composition.is_needed:
            written = CUT.join([results, *_CHARACTERS]).translate(values)
            is_exact = _nfc(written) == written
        else:
            later = {character for key in whole for character in key[1:]}
            is_exact = later.isdisjoint(key[0] for key in whole)
        is_final = results.translate(values) == results
        if len(composition.exceptions) > _MOST_EXCEPTIONS or not is_final or not is_exact:
            raise UserError(
                "its normalisation has rules of several characters that a fast tokenizer cannot express; train it with "
                "one of SentencePiece's own rules (normalization_rule_name), or with rules of single characters"
            )
        return composition

    def missed(self, rules: dict[str, str], values: dict[int, str]) -> list[str]:
        """Return the keys of several characters with another value than the composition."""
        whole = [key for key in rules if len(key) > 1]
        hide = str.maketrans(self.hidden)
        show = str.maketrans({stand_in: character for character, stand_in in self.hidden.items()})
        written = CUT.join(key[0] + key[1:].translate(hide) for key in whole).translate(values)
        composed = _nfc(written.translate(show)).split(CUT)
        return [key for key, made in zip(whole, composed, strict=True) if made != rules[key]]

    def before_the_table(self, rules: dict[str, str]) -> Iterator[normalizers.Normalizer]:
        """Yield the normalizers that replace exceptions, the longest first, and hide characters."""
        for key in sorted(self.exceptions, key=len, reverse=True):
            written = JOINT.join(map(re.escape, key))
            yield normalizers.Replace(Regex(f"{written}(?!{JOINT})"), rules[key])
        for character, stand_in in self.hidden.items():
            yield normalizers.Replace(f"{JOINT}{character}", f"{JOINT}{stand_in}")

    def after_the_table(self) -> Iterator[normalizers.Normalizer]:
        """Yield the normalizers that show the hidden characters and compose."""
        yield normalizers.Replace(JOINT, "")
        for character, stand_in in self.hidden.items():
            yield normalizers.Replace(stand_in, character)
        if self.is_needed:
            yield normalizers.NFC()


def _nfc(text: str) -> str:
    return normalizers.NFC().normalize_str(text)


def _class(characters: Iterable[str]) -> str:
    """Return the regular expression of any of the characters."""
    codes = sorted(map(ord, set(characters)))
    starts = [code for place, code in enumerate(codes) if place == 0 or codes[place - 1] != code - 1]
    stops = [code for place, code in enumerate(codes) if place == len(codes) - 1 or codes[place + 1] != code + 1]
    return "[" + "".join(rf"\x{{{start:x}}}-\x{{{stop:x}}}" for start, stop in zip(starts, stops, strict=True)) + "]"


class _Step(NamedTuple):
    """A character that continues a key."""

    character: str
    value: str | None  # of the key that ends here; None: the key is only the beginning of others
    state: int  # leads to the continuations of the key


class _Keys:
    """The keys of a table and their values: a double array (darts-clone) over the UTF-8 bytes of the keys."""

    def __init__(self, table: bytes) -> None:
        (size,) = struct.unpack_from("<I", table)
        self._units = struct.unpack_from(f"<{size // 4}I", table, 4)
        self._values = table[4 + size :]
        self._children = defaultdict[int, list[int]](list)
        for index, unit in enumerate(self._units):
            if not unit >> 31 and unit & 0xFF:
                self._children[index ^ unit & 0xFF].append(index)
        self._root = self._state_at(0)
        self.after = cache(lambda state: list(self._steps(state, b"")))

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield each key and its value."""
        waiting = [("", self._root)]
        while waiting:
            beginning, state = waiting.pop()
            for step in self.after(state):
                key = beginning + step.character
                if step.value is not None:
                    yield key, step.value
                waiting.append((key, step.state))

    def joints(self) -> Iterator[tuple[str, str]]:
        """Yield regular expressions of what is before and what is after a place between two characters of a key."""
        waiting = [("", [self._root])]
        while waiting:
            before, states = waiting.pop()
            by_rest = defaultdict[frozenset[_Step], list[_Step]](list)
            for step in dict.fromkeys(step for state in states for step in self.after(state)):
                by_rest[frozenset(self.after(step.state))].append(step)
            for rest, steps in by_rest.items():
                if rest:
                    longer = before + _class(step.character for step in steps)
                    yield longer, _class(step.character for step in rest)
                    waiting.append((longer, [steps[0].state]))

    def _steps(self, state: int, beginning: bytes) -> Iterator[_Step]:
        for index in self._children.get(state, ()):
            unit = self._units[index]
            code = beginning + bytes([unit & 0xFF])
            following = self._state_at(index)
            try:
                character = code.decode()
            except UnicodeDecodeError:
                yield from self._steps(following, code)
                continue
            value = None
            if unit >> 8 & 1:
                start = self._units[following] & 0x7FFFFFFF
                value = self._values[start : self._values.index(b"\0", start)].decode()
            yield _Step(character, value, following)

    def _state_at(self, index: int) -> int:
        unit = self._units[index]
        return index ^ (unit >> 10 << ((unit & 0x200) >> 6))
