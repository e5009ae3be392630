"""`megarl chat` without an engine: what is loaded, and what a model is asked."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.chat import converse, loadable, main, typed_lines

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9, "seed": 3, "system": None, "plain": False}


class Echo:
    """Responds with what it is asked."""

    def __init__(self, *, has_template: bool) -> None:
        self.has_template = has_template
        self.sampling: list[tuple[float, int, int | None]] = []

    def respond(
        self, prompt: str | Sequence[dict[str, str]], *, temperature: float, max_tokens: int, seed: int | None
    ) -> str:
        self.sampling.append((temperature, max_tokens, seed))
        if isinstance(prompt, str):
            return f"text {prompt}"
        return " ".join(f"{message['role']}:{len(message['content'])}" for message in prompt)


def test_a_conversation_remembers_until_another_begins(capsys: pytest.CaptureFixture[str]) -> None:
    model = Echo(has_template=True)
    converse(model, OPTIONS | {"system": "Be."}, ["abc", "d", "/new", "ef"])
    assert capsys.readouterr().out.splitlines() == [
        "system:3 user:3",
        "system:3 user:3 assistant:15 user:1",
        "system:3 user:2",
    ]
    assert model.sampling == [(0.0, 9, 3)] * 3


@pytest.mark.parametrize(("has_template", "plain"), [(False, False), (True, True)])
def test_texts_are_continued_alone(has_template: bool, plain: bool, capsys: pytest.CaptureFixture[str]) -> None:
    converse(Echo(has_template=has_template), OPTIONS | {"plain": plain}, ["a", "b"])
    assert capsys.readouterr().out.splitlines() == ["text a", "text b"]


def test_lines_end_with_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["a", "  ", "b"])

    def read(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    assert list(typed_lines()) == ["a", "b"]


def test_exported_model_is_loaded_in_place(tmp_path: Path) -> None:
    exported = tmp_path / "run" / "huggingface"
    exported.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (exported / name).touch()
    for model in (exported, exported.parent):
        with loadable(model) as found:
            assert found == exported


def test_what_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path} is neither an exported model, nor a checkpoint, nor a run" in capsys.readouterr().err


def test_library_warnings_are_hidden_from_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Announcing:
        has_template = False

        def __init__(self, model_dir: Path, *, trust_remote_code: bool) -> None:
            warnings.warn("this name goes away", FutureWarning, stacklevel=1)

        def respond(self, prompt: object, **sampling: object) -> str:
            warnings.warn("so does this", FutureWarning, stacklevel=1)
            return "4"

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr("megarl.rollout.chat.ChatEngine", Announcing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert main([str(tmp_path), "--prompt", "2 + 2 ="]) == 0
    out, err = capsys.readouterr()
    assert out == "4\n" and re.fullmatch(r"starting: import .*\n", err)
    assert not told


def test_engine_preloads_nothing_for_later_programs(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from megarl.commands.new.tiny import write_model
from megarl.rollout.chat import ChatEngine
write_model(Path(sys.argv[1]))
ChatEngine(Path(sys.argv[1]), trust_remote_code=False)
os._exit("LD_PRELOAD" in os.environ)
"""
    before = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], env=before, timeout=300)
    assert done.returncode == 0
