"""The decorator of every configuration section, and the bounded numbers that sections use.

Pydantic drops unknown keys of a plain dataclass silently. `section` makes an unknown key a fault. Every number has
bounds, so a typing error is a fault too, and no number overflows later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field

from megarl.mark import Change

T = TypeVar("T")

_INT32 = 2**31 - 1

Count = Annotated[int, Field(gt=0, le=1_000_000)]
"""A number of samples, ranks, processes, epochs or files: 1 to a million."""
Length = Annotated[int, Field(gt=0, le=_INT32)]
"""A number of tokens, characters or steps: 1 to 2^31 - 1."""
CountFromZero = Annotated[int, Field(ge=0, le=_INT32)]
"""A `Length` or 0."""
Interval = Annotated[int, Field(ge=-1, le=_INT32)]
"""The number of steps between two events; -1 and 0 = the event never happens."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed that NumPy, torch and vLLM all accept."""
Seconds = Annotated[float, Field(gt=0.0, le=1e8)]
"""A duration: more than 0, less than four years."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share, a probability or a discount: 0 to 1."""
Weight = Annotated[float, Field(ge=0.0, le=1e6)]
"""The factor of a term of a loss or a reward: 0 to a million."""
Score = Annotated[float, Field(ge=-1e30, le=1e30)]
"""The score of a response. Sums of scores fit float32."""
Bound = Annotated[float, Field(gt=0.0, le=1e30)]
"""A bound on a norm, ratio, value or divergence. 1e30 bounds nothing and still fits float32."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(change: Change | None = None) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a frozen, keyword-only dataclass, which refuses unknown keys, infinity and NaN.

    `change` is that of the keys without one of their own.
    """

    def decorate(cls: type[T]) -> type[T]:
        cls.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
        cls.__change__ = change  # type: ignore[attr-defined]
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def flatten(params: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and leaf values of nested mappings. An empty mapping is a leaf."""
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def listed(names: str | Sequence[str] | None) -> list[str]:
    """Return the names in a value that is one name, several or nothing."""
    return [names] if isinstance(names, str) else list(names or ())
