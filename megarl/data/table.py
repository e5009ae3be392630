"""The columns that are read of a data file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megarl.platform.errors import UserError

DataRow = dict[str, Any]
_PLAIN = re.compile(r"\w+([ .-]\w+)*")


@dataclass(frozen=True, kw_only=True)
class WantedColumns:
    """The columns that are read from a file."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    remedies: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Advice by column, for messages about a missing column."""

    def find(self, name: str, found: Iterable[str]) -> tuple[str, ...]:
        """Return the wanted columns among the columns `found` in the file `name`.

        Raises:
            UserError: wanted columns are missing or exist twice; names all of them.
        """
        found = list(found)
        wanted = dict.fromkeys((*self.required, *self.optional))
        faults = []
        missing = [self._described(column) for column in self.required if column not in found]
        if missing:
            faults.append(f"has no column {', '.join(missing)}; it has {', '.join(map(_name, found))}")
        twice = [repr(column) for column in wanted if found.count(column) > 1]
        if twice:
            faults.append(f"has more than one column {', '.join(twice)}: rename or remove all but one")
        if faults:
            raise UserError(f"{name} {', and '.join(faults)}")
        return tuple(column for column in wanted if column in found)

    def _described(self, column: str) -> str:
        return f"{column!r} ({self.remedies[column]})" if column in self.remedies else repr(column)


def _name(column: str) -> str:
    """Return the name of a column for a list, in quotes if its beginning and its end would not show there."""
    return column if _PLAIN.fullmatch(column) else repr(column)
