"""A server on this machine that speaks as much of the Hugging Face hub's API as the hub's own client asks for."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.http_server import LocalServer, QuietHandler, serving

TOKEN = "hf_" + "t" * 34
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(.*))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """The files of a model or a data set, by revision and name."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    private: bool = False
    writable: bool = True

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the branch main."""
        return self.revisions["main"]

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a revision, which its name or its commit names; None if there is none."""
        named = (files for name, files in self.revisions.items() if revision in (name, commit_of(name)))
        return next(named, None)


def commit_of(revision: str) -> str:
    """Return the commit of a revision."""
    return revision if re.fullmatch("[0-9a-f]{40}", revision) else _digest(revision.encode())


def _digest(content: bytes) -> str:
    return sha1(content, usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """The repositories by kind and id, as `models/OWNER/NAME`, and the requests so far."""

    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # method and path
    fails_at: str = "nothing"  # a part of the path of the requests that are refused

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        """Add a revision of `models/OWNER/NAME` or `datasets/OWNER/NAME`."""
        self.repositories.setdefault(name, Repository()).revisions[revision] = files

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, Any]:
        """Return the status and the content of an answer: bytes of a file, or a value of JSON."""
        self.asked.append(f"{method} {path}")
        if self.fails_at in path:
            return 403, {"error": "refused"}
        if token != f"Bearer {TOKEN}" and (token or method == "POST"):
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := _FILE.fullmatch(path):
            kind, name, revision, file = found.groups()
            return self._read(f"{kind or 'models/'}{name}", revision, file)
        if found := _API.fullmatch(path):
            repository = self.repositories.get(f"{found[1]}/{found[2]}")
            return self._about(repository, found[2], found[3] or "", body) if repository else (404, {})
        return 404, {}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted['organization']}/{wanted['name']}"
        made = {"url": f"{self.address}/{name}"}
        if f"models/{name}" in self.repositories:
            return 409, made
        self.repositories[f"models/{name}"] = Repository(private=wanted.get("visibility") == "private")
        return 200, made

    def _read(self, name: str, revision: str, file: str) -> tuple[int, Any]:
        files = self.repositories.get(name, Repository()).at(unquote(revision)) or {}
        return (200, files[file]) if file in files else (404, {})

    def _about(self, repository: Repository, name: str, question: str, body: bytes) -> tuple[int, Any]:
        topic, _, rest = question.partition("/")
        revision, _, folder = rest.partition("/")
        revision = unquote(revision) or "main"
        files = repository.at(revision)
        if topic == "auth-check":
            return (200, {}) if repository.writable else (403, {"error": "You may not write here"})
        if topic == "preupload":
            wanted = json.loads(body)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": file["path"], **modes} for file in wanted]}
        if topic == "commit":
            for part in map(json.loads, body.splitlines()):
                if part["key"] == "file":
                    repository.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": commit_of(revision)}
        if files is None:
            return 404, {"error": f"Invalid rev id: {revision}"}
        if topic == "tree":
            prefix = f"{unquote(folder)}/" if folder else ""
            return 200, [_entry(path, files[path]) for path in sorted(files) if path.startswith(prefix)]
        siblings = [{"rfilename": path} for path in files]
        return 200, {"id": name, "sha": commit_of(revision), "private": repository.private, "siblings": siblings}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": _digest(content), "size": len(content)}


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """Serve an empty hub, which programs that start in the block ask, with a cache of their own at `home`."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path
            status, content = hub.answer(self.command, path, self.headers.get("Authorization"), body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            begin, end = 0, len(data)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked and status == 200:
                status, begin, end = 206, int(asked[1]), min(end, int(asked[2]) + 1)
            self.send_response(status)
            self.send_header("Content-Length", str(end - begin))
            if file := _FILE.fullmatch(path):
                self.send_header("X-Repo-Commit", commit_of(unquote(file[3])))
            self.send_header("ETag", f'"{_digest(data)}"')
            if status == 404:
                self.send_header("X-Error-Code", _missing(path))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[begin:end])

        do_HEAD = do_POST = do_GET  # noqa: N815 - the server looks for these names

    def _missing(path: str) -> str:
        if found := _FILE.fullmatch(path):
            return "EntryNotFound" if f"{found[1] or 'models/'}{found[2]}" in hub.repositories else "RepoNotFound"
        found = _API.fullmatch(path)
        known = found and f"{found[1]}/{found[2]}" in hub.repositories
        return "RevisionNotFound" if known else "RepoNotFound"

    with serving(LocalServer(Handler)) as server:
        hub = Hub(server.address)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
