"""A server of chat completions that judges, fails, stalls, limits and lies; the question says what it does."""

import json
import threading
import time
from collections import Counter
from typing import Any

from tests.support.http_server import LocalServer, QuietHandler


class JudgeServer(LocalServer):
    """The server, and what it was asked."""

    def __init__(self) -> None:
        """Listen on a free port of this machine."""
        super().__init__(_Handler)
        self.asked: list[dict[str, Any]] = []
        self.times: dict[str, list[float]] = {}
        self.count = Counter[str]()
        self.running, self.most_running = Counter[str](), Counter[str]()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The base address, as `reward_model.judge.url` has it."""
        return f"{self.address}/v1"


class _Handler(QuietHandler):
    server: JudgeServer

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].strip()
        server = self.server
        with server.lock:
            server.asked.append(body | {"path": self.path, "key": self.headers["Authorization"]})
            server.times.setdefault(text, []).append(time.monotonic())
            server.count[text] += 1
            server.running[text] += 1
            server.most_running[text] = max(server.most_running[text], server.running[text])
        try:
            self._answer(text, server.count[text])
        finally:
            with server.lock:
                server.running[text] -= 1

    def _answer(self, text: str, attempt: int) -> None:
        match text.split(maxsplit=1):
            case [failing, said] if failing.endswith("-once"):
                if attempt == 1:
                    self._fail(failing.removesuffix("-once"))
                else:
                    self._say(said)
            case ["refuses"]:
                self._send(401, f"no such key: {self.headers['Authorization']}")
            case ["is-away"]:
                self._send(503, "away")
            case ["stalls"]:
                time.sleep(30)
            case ["is-cut", said]:
                self._say(said, "length")
            case ["has-no-choice"]:
                self._send(200, json.dumps({"choices": []}))
            case ["has-no-text"]:
                self._send(200, json.dumps({"choices": [{"message": {"content": None}}]}))
            case _:
                self._say(text)

    def _fail(self, how: str) -> None:
        match how:
            case "fails":
                self._send(500, "an inner fault")
            case "limits":
                self._send(429, "slow down", {"Retry-After": "2"})
            case "stalls":
                time.sleep(30)
            case "hangs-up":
                self.close_connection = True
            case "talks-nonsense":
                self._send(200, "<html>")
            case "compresses-wrongly":
                self._send(200, "no gzip", {"Content-Encoding": "gzip"})
            case "nests-deeply":
                self._send(200, "[" * 100_000)

    def _say(self, content: str, reason: str = "stop") -> None:
        time.sleep(0.05)
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": reason}
        self._send(200, json.dumps({"choices": [choice]}))

    def _send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
