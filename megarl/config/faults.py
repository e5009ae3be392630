"""The faults of a configuration: one for each key, and one error that holds all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.platform.errors import UserError
from megarl.platform.secrets import redact
from megarl.platform.terminal import visible


@dataclass(frozen=True)
class Fault:
    """One thing to correct."""

    path: str  # the dotted key, or the argument that could not be read
    message: str  # what is wrong and what to write instead
    origin: str | None = None  # the file or the command line it was read from
    about: str | None = None  # another key that was probably meant
    missing: bool = False  # whether megarl lacks what the key asks for, so that no other value helps

    def __str__(self) -> str:
        origin = f" [{self.origin}]" if self.origin else ""
        return f"{self.path}{origin}: {self.message}"


class ConfigError(UserError):
    """All faults of a configuration, in the order of its keys; its text has neither secrets nor control characters."""

    def __init__(self, faults: Sequence[Fault]):
        self.faults = tuple(sorted(faults, key=lambda fault: fault.path))
        lines = [f"  {fault}" for fault in self.faults]
        count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
        super().__init__(visible(redact("\n".join([f"{count} in the configuration:", *lines]))))


@contextmanager
def fault_of(key: str) -> Iterator[None]:
    """Turn a UserError into a fault of a key, or of the key within its section that begins the message."""
    try:
        yield
    except UserError as error:
        named, _, rest = str(error).partition(": ")
        is_within = named.startswith(f"{key}.") and bool(rest)
        raise ConfigError([Fault(named, rest) if is_within else Fault(key, str(error))]) from error
