"""The error that a user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A fault in what a user gives: configuration, data, files, or limits of the machine.

    The message names the key or the file, the cause and the remedy, so a command ends with the message alone. Every
    other exception ends a command with its traceback.
    """


@contextmanager
def placed(before: str) -> Iterator[None]:
    """Put `before`, which tells the place of a fault, in front of the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{before}{error}") from error
