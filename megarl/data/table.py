"""The protocol of a data file: its rows are in groups, and each group can be read alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from megarl.platform.errors import UserError

DataRow = dict[str, Any]


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


class RowGroup(Protocol):
    """Neighbouring rows that can be read without the rest of the file."""

    @property
    def num_rows(self) -> int:
        """Rows in the group, at least 1."""

    @property
    def num_bytes(self) -> int:
        """Uncompressed bytes of the columns that are read, as the file states them: the same for every reader."""

    def parts(self, part_bytes: int) -> list[range]:
        """Return the rows of each part, counted from the group's first; a small group is one part."""

    def read(self, rows: range) -> Iterator[Any]:
        """Yield record batches of a range of rows.

        Raises:
            UserError: the file cannot be read, or has changed.
        """

    def decode(self, record: DataRow) -> DataRow:
        """Return the columns of a row; `record` is the row of a batch.

        Raises:
            UserError: the columns cannot be read.
        """


class RowTable(Protocol):
    """A file of rows."""

    @property
    def name(self) -> str:
        """The name as the user wrote it."""

    def groups(self) -> Iterator[RowGroup]:
        """Yield the groups in file order; there is at least one."""

    def row_name(self, number: int) -> str:
        """Describe the row with this number, counted from 0, for messages."""
