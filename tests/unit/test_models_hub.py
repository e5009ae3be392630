"""A Hugging Face hub is asked once, whether it answers or not; if it does not, the message has the remedy."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.http_server import LocalServer, QuietHandler, serving
from tests.support.hub_server import hub_server
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

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
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

    with serving(LocalServer(Handler)) as server:
        yield server.address, asked


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


OPEN = """
import sys
from megarl.config.model_files import model_faults, read_sizes, tokenizer_faults
from megarl.data.remote_tokenizer import find_tokenizer
from megarl.models.config import ModelSection
from megarl.models.hub import config_place, local_directory
from megarl.platform.hub import downloaded
for name in sys.argv[1:]:
    section = ModelSection(path=name)
    assert not [*model_faults(section, "model.path"), *tokenizer_faults(name, "data.tokenizer", "")]
    assert read_sizes(section) is None  # the configuration is checked without the hub
    files = sorted(path.name for path in local_directory(name).iterdir())
    print((config_place(name) / "config.json").read_text(), files)
    assert find_tokenizer(name, with_code=False) == downloaded(name, ["tokenizer.json"]) == local_directory(name)
"""


def test_uri_of_hub_means_id_and_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("org/model", "hf://org/model", "hf://org/model@v1")
    rest = {"tokenizer.json": b"{}", "model.safetensors": b"", "README.md": b"---\nlicense: mit\n---\n"}
    with hub_server(monkeypatch, tmp_path / "home") as served:
        served.add("models/org/model", {"config.json": b'{"new": 1}', "model.py": b"", "model.bin": b"", **rest})
        served.add("models/org/model", {"config.json": b'{"old": 1}', **rest}, "v1")
        code, printed = run_program(sys.executable, "-c", OPEN, *names, timeout_s=120)
    assert code == 0, printed
    files = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert printed.splitlines() == [f'{{"{age}": 1}} {files}' for age in ("new", "new", "old")]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_program(sys.executable, "-c", OPEN, *names, timeout_s=120) == (0, printed)


@pytest.mark.parametrize("name", ["hf://org/none", "hf://org/model@v9"])
def test_missing_revision_names_the_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(monkeypatch, tmp_path / "home") as served:
        served.add("models/org/model", {"config.json": b"{}"})
        asked = ASK.format(module="models.hub", function="config_place").replace("org/model", name)
        code, output = run_program(sys.executable, "-c", asked, timeout_s=120)
    assert code == 0, output
    assert f"said: {name} is no local directory, and as a Hugging Face id it failed: " in output
    assert "what is behind a licence needs HF_TOKEN" in output
