"""The values of a `config.json`; the type and range of each are checked when it is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.platform.errors import UserError

WIDEST = 1 << 24
"""The largest size that a layer or a vocabulary may have."""
MOST_LAYERS = MOST_EXPERTS = 10_000
LONGEST = 1 << 40  # positions: an unused position costs nothing
SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True)
class Fields:
    """A parsed `config.json`. Every method raises UserError with the key, its value and the allowed values."""

    values: Mapping[str, Any]  # without nulls, which mean no value

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "Fields":
        """Return the fields that have a value."""
        return cls({key: value for key, value in config.items() if value is not None})

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = WIDEST) -> int:
        """Return a whole number from `least` to `most`; required unless there is a `default`, which is not checked."""
        if key not in self.values and default is not None:
            return default
        value = self._required(key)
        if type(value) is not int or not least <= value <= most:
            raise wrong(key, value, f"must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        if key not in self.values and default is not None:
            return default
        value = self._required(key)
        if type(value) not in (int, float) or not 0.0 < _as_float(value) < math.inf:
            raise wrong(key, value, "must be a number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise wrong(key, value, "must be true or false")
        return value

    def items(self, key: str) -> list[object]:
        """Return a list, empty if the key is missing."""
        value = self.values.get(key, [])
        if not isinstance(value, list | tuple):
            raise wrong(key, value, "must be a list")
        return list(value)

    def table(self, key: str) -> "Fields":
        """Return an object with fields of its own, empty if the key is missing."""
        value = self.values.get(key, {})
        if not isinstance(value, Mapping):
            raise wrong(key, value, "must be an object")
        return Fields.of(value)

    def tokens(self, key: str, vocab_size: int, *, least: int = 0) -> list[int]:
        """Return the id or ids at `key`, from `least` to `vocab_size`, without -1, which means no token."""
        value = self.values.get(key, [])
        found = list(value) if isinstance(value, list | tuple) else [value]
        if any(type(token) is not int or not least <= token < vocab_size for token in found):
            raise wrong(key, value, f"must be a token or a list of tokens below vocab_size {vocab_size}")
        return [token for token in found if token >= 0]

    def _required(self, key: str) -> Any:
        if key not in self.values:
            raise UserError(f"config.json of a {self.values.get('model_type')} model has no {key}")
        return self.values[key]


def wrong(key: str, value: object, remedy: str) -> UserError:
    """Return the error for an impossible value; `remedy` describes the allowed values."""
    try:
        shown = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number with too many digits
        shown = f"a {type(value).__name__}"
    return UserError(f"config.json: {key} {shown[:SHOWN]}: {remedy}")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number above 1e308
        return math.inf
