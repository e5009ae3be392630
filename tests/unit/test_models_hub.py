"""A Hugging Face hub that does not answer is asked once, and the message has the remedy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.programs import run_program

ASK = """
from megarl.{module} import {function}
try:
    {function}("org/model")
except ValueError as error:
    print("said:", error)
"""


@contextmanager
def broken_hub() -> Iterator[tuple[str, list[str]]]:
    """Serve a hub that is out of order; yield its address and the requests that arrive."""
    asked: list[str] = []

    class Unavailable(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        do_HEAD = do_GET  # noqa: N815 - the server looks for this name

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    ("module", "function"),
    [("models.hub", "config_place"), ("models.hub", "local_directory"), ("data.tokenizer", "load_tokenizer")],
)
def test_a_hub_that_does_not_answer_is_asked_once(
    module: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with broken_hub() as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        code, output = run_program(sys.executable, "-c", ASK.format(module=module, function=function), timeout_s=120)
    assert code == 0, output
    assert "said: org/model is no local directory, and as a Hugging Face id it failed: " in output
    assert "download it on another machine and name its directory" in output
    assert [path for path in asked if "org/model" in path] == ["/api/models/org/model/revision/main"]
