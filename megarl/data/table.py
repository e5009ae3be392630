"""What rows are read from: a file whose rows lie in groups, each of which can be read alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

DataRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which columns are read of a file."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    remedies: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """By column: what may be done if it is missing, for messages."""

    def find(self, name: str, found: Iterable[str]) -> tuple[str, ...]:
        """Return the wanted ones of the columns `found` in the file `name`.

        Raises:
            ValueError: some are missing, or there twice; names all of them.
        """
        found = list(found)
        wanted = dict.fromkeys((*self.required, *self.optional))
        faults = []
        if missing := [self._told(column) for column in self.required if column not in found]:
            faults.append(f"has no column {', '.join(missing)}; it has {', '.join(found)}")
        if twice := [repr(column) for column in wanted if found.count(column) > 1]:
            faults.append(f"has more than one column {', '.join(twice)}: rename or remove all but one")
        if faults:
            raise ValueError(f"{name} {', and '.join(faults)}")
        return tuple(column for column in wanted if column in found)

    def _told(self, column: str) -> str:
        return f"{column!r} ({self.remedies[column]})" if column in self.remedies else repr(column)


class Group(Protocol):
    """Neighbouring rows that can be read without others."""

    @property
    def num_rows(self) -> int:
        """At least 1."""

    @property
    def num_bytes(self) -> int:
        """Uncompressed, by the file's own account, of what is read; no order depends on who reads it."""

    def parts(self, part_bytes: int) -> list[range]:
        """Return the rows of each part, counted from the group's first; all of them if they are small enough."""

    def read(self, rows: range) -> Iterator[Any]:
        """Yield record batches of a run of rows.

        Raises:
            ValueError: the file cannot be read, or is not what it was.
        """

    def decode(self, record: DataRow) -> DataRow:
        """Return the columns of a row; `record` is the row of a batch.

        Raises:
            ValueError: they cannot be read.
        """


class Table(Protocol):
    """A file of rows."""

    @property
    def name(self) -> str:
        """As the user wrote it."""

    def groups(self) -> Iterator[Group]:
        """Yield the groups in the file's order; there is at least one."""

    def row_name(self, number: int) -> str:
        """Say for people which row the one with this number, counted from 0, is."""
