"""Checks all rows before training starts, so that no fault appears only when a row is reached."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.distributed.exchange import in_shares
from megarl.platform.errors import UserError, placed

SHOWN_FAULTS = 20

T = TypeVar("T")


@dataclass
class RowFaults:
    """The faults of some rows: the first as messages, and the number of all."""

    shown: list[str] = field(default_factory=list)
    number: int = 0

    def add(self, message: str) -> None:
        """Count a fault."""
        self.number += 1
        if self.number <= SHOWN_FAULTS:
            self.shown.append(message)


def check_each(rows: Rows, numbers: range, check: Callable[[DataRow], T], faults: RowFaults) -> Iterator[tuple[int, T]]:
    """Yield the number of each row that `check` accepts, with its result; add the others to `faults`."""
    for number in numbers:
        try:
            row = rows[number]
            with placed(f"{rows.place(number)}, "):
                result = check(row)
        except UserError as error:
            faults.add(str(error))
        else:
            yield number, result


def raise_faults(found: Iterable[RowFaults]) -> None:
    """Raise a UserError that names the first faults of all shares of the rows; return if there is none."""
    shares = list(found)
    shown = [message for share in shares for message in share.shown][:SHOWN_FAULTS]
    others = sum(share.number for share in shares) - len(shown)
    if others:
        shown.append(f"... and {others} more")
    if shown:
        raise UserError("\n".join(shown))


def check_rows(rows: Rows, check: Callable[[DataRow], None]) -> None:
    """Check all rows; each rank checks a share of them. Collective.

    Raises:
        UserError: on every rank, if `check` raises for some rows; names the first of them.
    """

    def check_share(share: range) -> RowFaults:
        faults = RowFaults()
        for _ in check_each(rows, share, check, faults):
            pass
        return faults

    raise_faults(in_shares(len(rows), check_share))
