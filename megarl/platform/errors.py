"""The error that a user can mend."""


class UserError(ValueError):
    """A fault in what a user gives: configuration, data, files, or limits of the machine.

    The message names the key or the file, the cause and the remedy, so a command ends with the message alone. Every
    other exception ends a command with its traceback.
    """
