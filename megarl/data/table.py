"""The rows of one data file, and the columns of it that are read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from megarl.platform.errors import UserError

DataRow = dict[str, Any]


class RowTable(Protocol):
    """The rows of one file, in memory."""

    @property
    def name(self) -> str:
        """The name as the user wrote it."""

    def __len__(self) -> int:
        """The number of rows, at least 1."""

    def __getitem__(self, number: int) -> DataRow:
        """Return the wanted columns of a row, counted from 0.

        Raises:
            UserError: the row cannot be read; the message begins with `row_name`.
        """

    def row_name(self, number: int) -> str:
        """Describe the row with this number, counted from 0, for messages."""


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
            faults.append(f"has no column {', '.join(missing)}; it has {', '.join(found)}")
        twice = [repr(column) for column in wanted if found.count(column) > 1]
        if twice:
            faults.append(f"has more than one column {', '.join(twice)}: rename or remove all but one")
        if faults:
            raise UserError(f"{name} {', and '.join(faults)}")
        return tuple(column for column in wanted if column in found)

    def _described(self, column: str) -> str:
        return f"{column!r} ({self.remedies[column]})" if column in self.remedies else repr(column)
