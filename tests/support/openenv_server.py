"""A server of OpenEnv's HTTP protocol that counts turns, and that fails, stalls and lies if a turn says so."""

import json
import threading
import time
from collections import Counter
from typing import Any

from tests.support.http_server import LocalServer, QuietHandler


class OpenEnvServer(LocalServer):
    """The server, its episodes, and what it was asked."""

    def __init__(self) -> None:
        """Listen on a free port of this machine."""
        super().__init__(_Handler)
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.said: dict[str, list[str]] = {}  # the turns of each episode
        self.count = Counter[str]()  # of each turn, over all episodes
        self.lock = threading.Lock()


class _Handler(QuietHandler):
    server: OpenEnvServer

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append((self.path, body, self.headers["Authorization"]))
        episode = body["episode_id"]
        if self.path == "/reset":
            server.said[episode] = []
            self._send(200, self._observed("begin", None))
            return
        text = body["action"]["message"]
        with server.lock:
            server.count[text] += 1
        server.said[episode].append(text)  # also if the reply is lost: the turn is taken
        self._answer(text, server.said[episode], attempt=server.count[text])

    def _answer(self, text: str, said: list[str], *, attempt: int) -> None:
        good = self._observed(f"{len(said)}: {' '.join(said)}", len(said) / 4, done=len(said) == 3)
        match text:
            case "fails once" if attempt == 1:
                self._send(500, "an inner fault")
            case "stalls once" if attempt == 1:
                time.sleep(30)
            case "hangs up once" if attempt == 1:
                self.close_connection = True
            case "lies once" if attempt == 1:
                self._send(200, json.dumps({"observation": "text", "reward": "much", "done": 1}))
            case "talks nonsense once" if attempt == 1:
                self._send(200, "<html>")
            case "floods once" if attempt == 1:
                self._send(200, "x" * (1 << 23))
            case "refuses":
                self._send(422, f"no such action: {self.headers['Authorization']}")
            case "is away":
                self._send(503, "away")
            case "earns infinity":
                self._send(200, '{"observation": {}, "reward": 1e999, "done": false}')
            case "is fickle":
                self._send(200, self._observed(f"{attempt}", 0.0))
            case _:
                self._send(200, good)

    @staticmethod
    def _observed(text: str, reward: float | None, *, done: bool = False) -> str:
        return json.dumps({"observation": {"message": text}, "reward": reward, "done": done})

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
