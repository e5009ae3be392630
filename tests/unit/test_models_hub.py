"""A Hugging Face hub is asked once, whether it answers or not; if it does not, the message has the remedy."""

import json
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
ASK_TWICE = """
from megarl.models.hub import config_place
print((config_place("org/model") / "config.json").read_text(), config_place("org/model") == config_place("org/model"))
"""
REVISION = "/api/models/org/model/revision/main"
COMMIT = "0" * 40


@contextmanager
def hub(contents: bytes | None) -> Iterator[tuple[str, list[str]]]:
    """Serve a hub with one `config.json`, or out of order without `contents`; yield its address and the requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if contents is None:
                self.send_error(503)
                return
            file = {"type": "file", "path": "config.json", "oid": "1", "size": len(contents)}
            model = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}
            if "/resolve/" in self.path:
                body = contents
            else:
                body = json.dumps([file] if "/tree/" in self.path else model).encode()
            self.send_response(200)
            for name, value in {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the server looks for this name

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    ("module", "function"),
    [("models.hub", "config_place"), ("models.hub", "local_directory"), ("data.tokenizer", "load_tokenizer")],
)
def test_unavailable_hub_is_asked_once(
    module: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with hub(None) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        code, output = run_program(sys.executable, "-c", ASK.format(module=module, function=function), timeout_s=120)
    assert code == 0, output
    assert "said: org/model is no local directory, and as a Hugging Face id it failed: " in output
    assert "download it on another machine and name its directory" in output
    assert [path for path in asked if "org/model" in path] == [REVISION]


def test_available_hub_is_asked_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with hub(b'{"model_type": "llama"}') as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        code, output = run_program(sys.executable, "-c", ASK_TWICE, timeout_s=120)
    assert code == 0, output
    assert '{"model_type": "llama"} True' in output
    assert asked.count(REVISION) == 1
