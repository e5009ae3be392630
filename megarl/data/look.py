"""Checks all rows before training starts, so that no fault appears only when a row is reached."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.distributed.exchange import in_shares
from megarl.platform.errors import UserError

SHOWN_FAULTS = 20


def select_rows(rows: Rows, keeps: Callable[[DataRow], bool]) -> NDArray[np.int64]:
    """Return the numbers of the rows that `keeps` accepts; each rank checks a share of the rows. Collective.

    Raises:
        UserError: on every rank, if `keeps` raises for some rows; names the first of them.
    """

    def check(share: range) -> tuple[list[int], list[str], int]:
        kept = list[int]()
        faults = list[str]()
        num_faults = 0
        for number in share:
            try:
                if _is_kept(rows, number, keeps):
                    kept.append(number)
            except UserError as error:
                num_faults += 1
                if num_faults <= SHOWN_FAULTS:
                    faults.append(str(error))
        return kept, faults, num_faults

    shares = in_shares(len(rows), check)
    faults = [fault for _, of_share, _ in shares for fault in of_share][:SHOWN_FAULTS]
    others = sum(num for _, _, num in shares) - len(faults)
    if others:
        faults.append(f"... and {others} more")
    if faults:
        raise UserError("\n".join(faults))
    return np.concatenate([np.array(kept, np.int64) for kept, _, _ in shares])


def _is_kept(rows: Rows, number: int, keeps: Callable[[DataRow], bool]) -> bool:
    row = rows[number]
    try:
        return keeps(row)
    except UserError as error:
        raise UserError(f"{rows.place(number)}, {error}") from error
