"""HTTP servers of this machine, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class LocalServer(ThreadingHTTPServer):
    """A server on a free port of this machine."""

    daemon_threads = True
    request_queue_size = 128
    """A loaded machine accepts late, and the kernel resets connections behind the five that it keeps by default."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen; `serving` answers."""
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def address(self) -> str:
        """The address without a path."""
        return f"http://127.0.0.1:{self.server_port}"


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that keeps connections and prints nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Print nothing."""


Server = TypeVar("Server", bound=LocalServer)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Answer requests until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
