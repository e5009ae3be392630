"""No screen reads the text of models, data and users as markup, and no terminal obeys it."""

import io
import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.commands import chat, compare, explain, verify, watch
from megarl.config.faults import ConfigError, Fault
from megarl.config.load import load_config
from megarl.config.report import show_plan
from megarl.data.messages import as_read, as_written
from megarl.data.tokenizer import load_tokenizer
from megarl.platform.finding import Finding, show
from megarl.platform.log import log_to_files
from megarl.platform.screen import Screen
from megarl.platform.terminal import visible
from megarl.report.page import render
from megarl.report.read import read_run
from megarl.tracking.console import Console
from tests.support.runs import write_run
from tests.support.sentencepieces import train_sentencepiece

Captured = pytest.CaptureFixture[str]
TEXTS = {
    r"\[x=5\]": r"\[x=5\]",
    r"so\[/y]": r"so\[/y]",
    "[/x]": "[/x]",
    "[bold]b[/bold]": "[bold]b[/bold]",
    "[link=a]c": "[link=a]c",
    ":warning:": ":warning:",
    "a\x1b[31mb": r"a\x1b[31mb",
    "a\x1b]0;title\x07": r"a\x1b]0;title\x07",
    "a\rb": r"a\rb",
    "a\x08b\x0bc": r"a\x08b\x0bc",
    "a\x9b2J": r"a\x9b2J",
    "a\u202eb\u2066c": r"a\u202eb\u2066c",
    "a\u2028b": r"a\u2028b",
}
"""Text of a model, a file or a user -> the text on a screen."""


def console(text: str, directory: Path, *, terminal: bool = False) -> str:
    out = io.StringIO()
    screen = Screen(file=out, width=400, force_terminal=terminal, color_system=None, legacy_windows=False)
    tracker = Console(total_steps=2, console=screen, next_steps=lambda ending: [("report", text)])
    for step in (0, 1):
        tracker.log({f"val-core/{text}/reward/mean@1": 0.5}, step=step)
        sample = {"prompt": f"p {text}", "response": f"r{step} {text}", "score": float(step)}
        tracker.log_table("val/generations", [sample], step=step)
    tracker.log_table(f"table {text}", [{f"column {text}": 1, "n": text}], step=1)
    tracker.close([{"summary": text}])
    return out.getvalue()


def terminal(text: str, directory: Path) -> str:
    return re.sub(r"\x1b\[(?:\?25[lh]|2K|1A)|\r(?=\x1b|\n|$)", "", console(text, directory, terminal=True))


def compared(text: str, directory: Path) -> str:
    runs = [write_run(directory / f"{name}{text}", config={"data": {"chat_template": text + name}}) for name in "ab"]
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row | {f'val/{text}': 1.0})}\n" for row in rows))
    assert compare.main([*map(str, runs)]) == 0
    return ""


def watched(text: str, directory: Path) -> str:
    run = write_run(directory / f"run{text}")
    rows = [{"step": step, "prompt": text, "response": text, "score": 1.0} for step in (0, 4)]
    (run / "val_generations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "status.json").write_text(json.dumps({"state": "running", "phase": text, "time": 1e12}))
    watch.main([str(run)])
    return ""


def verified(text: str, directory: Path) -> str:
    report = {
        "differences": {f"{text}-engine": {"max_abs_logprob": 0.0, "mean_prob": 0.0}},
        "roundtrip_exact": True,
        **dict.fromkeys(("bytes_received_max", "bytes_received_mean", "bytes_lower_bound", "peak_extra_bytes"), 1),
        "seconds": 1.0,
        "faults": [text],
        "ok": False,
    }
    verify.show(report)
    return ""


def planned(text: str, directory: Path) -> str:
    keys = ["data.train_files=a", "actor_rollout_ref.model.path=c", "critic.model.path=d"]
    names = {"teachers": {text: "sk-" + "a1" * 24}}
    (file := directory / "x.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": {"ref": names}}))
    show_plan(load_config([str(file), *keys], world_size=None, check_paths=False))
    return ""


def faulty(text: str, directory: Path) -> str:
    return str(ConfigError([Fault(path=f"data.{text}", message=text, origin=text)]))


def explained(text: str, directory: Path) -> str:
    (file := directory / "x.yaml").write_text(yaml.safe_dump({"data": {"prompt_key": text}}))
    explain.main([str(file), "data.prompt_key"])
    return ""


def examined(text: str, directory: Path) -> str:
    show(text, [[Finding(f"n{text}", text, text, "fault", command=text)]])
    return ""


def first_prompt(text: str, directory: Path) -> str:
    tokenizer = load_tokenizer(str(directory.parent / "tokenizer.model"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return as_read("the prompt", text, ids, tokenizer) + as_written("p", [{"role": "user", "content": text}])


def logged(text: str, directory: Path) -> str:
    root = logging.getLogger()
    before = root.handlers[:]
    log_to_files(directory, 0)
    logging.getLogger("megarl.here").warning("%s", text)
    for handler in {*root.handlers} - {*before}:
        root.removeHandler(handler)
        handler.close()
    return (directory / "log" / "rank_0.txt").read_text(encoding="utf-8")


SCREENS: dict[str, Callable[[str, Path], str]] = {
    "console": console,
    "terminal": terminal,
    "compare": compared,
    "watch": watched,
    "verify": verified,
    "plan": planned,
    "faults": faulty,
    "config": explained,
    "doctor": examined,
    "first prompt": first_prompt,
    "log": logged,
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "600")
    train_sentencepiece(tmp_path / "tokenizer.model", byte_fallback=True, vocab_size=600)
    (inner := tmp_path / "d").mkdir()
    return inner


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("text", TEXTS, ids=TEXTS.values())
def test_a_text_is_shown_as_it_is_written(text: str, screen: str, directory: Path, capsys: Captured) -> None:
    if screen in ("compare", "watch"):
        text = text.replace("/", "|")  # the text is also the name of a file
    said = SCREENS[screen](text, directory) or capsys.readouterr().out
    assert TEXTS.get(text, visible(text)) in said
    obeyed = {character for character in said if unicodedata.category(character) in ("Cc", "Cf", "Zl")}
    assert obeyed <= {"\n"}


@pytest.mark.parametrize("text", TEXTS, ids=TEXTS.values())
def test_a_terminal_does_not_obey_a_response(text: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    class Model:
        has_template = False

        def respond(self, prompt: Any, **sampling: Any) -> str:
            return text

    options = {"temperature": 0.0, "max_tokens": 1, "seed": None, "system": None, "plain": True}
    chat.converse(Model(), options, ["x"])
    assert capsys.readouterr().out == f"{text}\n"  # a file gets what the model wrote
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        chat.converse(Model(), options, ["x"])
        assert os.read(ours, 1000).decode() == f"{TEXTS[text]}\r\n"
    os.close(ours)


def test_words_keep_their_characters() -> None:
    words = "naïve 中文 🙂 👩\u200d🚀 می\u200cخواهم ½ → −5\n\ttab"
    assert visible(words) == words


@pytest.mark.parametrize("terminal", [False, True])
def test_a_data_source_stays_on_its_line(terminal: bool, tmp_path: Path) -> None:
    shown = console("two\nlines", tmp_path, terminal=terminal)
    assert r"validation two\nlines" in re.sub(r"  +", " ", shown)
    assert "validation two\n" not in re.sub(r" +", " ", shown)


def test_a_report_shows_control_characters(tmp_path: Path) -> None:
    name = "run\x1b[31m\u202e"
    write_run(tmp_path / name)
    page = render([read_run(tmp_path / name)])
    assert r"run\x1b[31m\u202e" in page
    assert "\x1b" not in page and "\u202e" not in page
