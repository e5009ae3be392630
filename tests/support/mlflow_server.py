"""An MLflow server for tests."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the time limit of pytest bounds the wait."""
    while not condition():
        time.sleep(0.05)


def lasting_port() -> int:
    """Return a free port below the range of client ports, which a client could take while the server is down."""
    for _ in range(1000):
        port = random.randrange(12000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class Server:
    """An MLflow server that can be started, killed and started again, always at the same address."""

    def __init__(self, directory: Path) -> None:
        self._port = lasting_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._directory = directory

    @contextmanager
    def running(self) -> Iterator[None]:
        store = ["--backend-store-uri", f"sqlite:///{self._directory / 'server.db'}"]
        store += ["--artifacts-destination", str(self._directory / "server")]
        place = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *place],
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # otherwise it starts ten more programs
            start_new_session=True,
        )
        try:
            wait_for(lambda: self._answers() or process.poll() is not None)
            assert process.poll() is None, "the server did not start"
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            wait_for(lambda: not self._answers())

    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def _answers(self) -> bool:
        try:
            return urlopen(f"{self.uri}/health", timeout=60).status == 200
        except OSError:
            return False
