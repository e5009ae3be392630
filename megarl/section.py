"""The mark every configuration section wears: a frozen dataclass that refuses keys it does not know.

Pydantic silently drops unknown keys of a plain dataclass; `section` is what makes a typo a fault.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Turn `cls` into a frozen, keyword-only dataclass whose unknown keys are errors."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values of nested mappings; an empty mapping is a leaf."""
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
