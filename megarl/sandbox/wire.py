"""Messages between ranks, supervisors and workers: JSON after its length, over a socket. Nothing in it can be run.

Rows of parquet have values that JSON lacks. They keep their types: in a packed value every JSON object is a tag with
the value that it tags.
"""

import base64
import socket
import struct
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from json import dumps, loads  # a file of a user may replace them in their module
from typing import Any

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 16

_PACK: Mapping[type, Callable[[Any], object]] = {  # a class before its base classes
    bytes: lambda value: base64.b64encode(value).decode("ascii"),
    Decimal: str,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
_UNPACK: Mapping[str, Callable[[Any], object]] = {
    "bytes": base64.b64decode,
    "Decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "tuple": lambda items: tuple(map(unpack, items)),
    "dict": lambda pairs: {unpack(key): unpack(value) for key, value in pairs},
}


def pack(value: object) -> object:
    """Convert a value of a data row to JSON values. TypeError for a value that no column of parquet has."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": list(map(pack, value))}
    if isinstance(value, list):
        return list(map(pack, value))
    for kind, to_json in _PACK.items():
        if isinstance(value, kind):
            return {kind.__name__: to_json(value)}
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return pack(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be passed to a reward")


def unpack(value: object) -> Any:
    """Return the value that `pack` received."""
    if isinstance(value, list):
        return list(map(unpack, value))
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        return _UNPACK[tag](content)
    return value


def with_values(packed: Mapping[str, Any], **values: object) -> Mapping[str, object]:
    """Return a packed mapping with other packed values of these keys."""
    return {"dict": list((dict(packed["dict"]) | values).items())}


def encode(message: object) -> bytes:
    """Return the bytes of a message."""
    content = dumps(message).encode("ascii")
    return _LENGTH.pack(len(content)) + content


class Inbox:
    """Assembles the messages that arrive in pieces from a socket."""

    def __init__(self, connection: socket.socket, *, max_bytes: int) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._held = bytearray()

    def read(self) -> None:
        """Read the bytes that have arrived, or wait for some. EOFError if the other side has hung up."""
        piece = self._connection.recv(_PIECE)
        if not piece:
            raise EOFError("the other side has hung up")
        self._held += piece

    def take(self) -> Any:
        """Return the next message; None if it is incomplete. ValueError if it is too long or not JSON."""
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self._max_bytes:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        content = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        try:
            return loads(content)
        except RecursionError as error:
            raise ValueError("a message too deeply nested") from error

    def wait(self) -> Any:
        """Wait for the next message and return it. EOFError as of `read`, ValueError as of `take`."""
        message = self.take()
        while message is None:
            self.read()
            message = self.take()
        return message
