"""Files are UTF-8 and output is complete, whatever the locale of a machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.programs import ROOT
from tests.support.runs import write_run
from tests.support.sentencepieces import train_sentencepiece

TEXT = "é漢🙂"
PACKAGE = ROOT / "megarl"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
READS = """
import locale, sys
from pathlib import Path
assert locale.getpreferredencoding(False) == "ANSI_X3.4-1968"
from megarl.data.tokenizer import load_tokenizer
from megarl.platform.terminal import ignore_broken_pipe
ignore_broken_pipe()
directory = Path(sys.argv[1])
for template in (str(directory / "own.jinja"), None):
    tokenizer = load_tokenizer(str(directory / "tokenizer.model"), chat_template=template)
    text = tokenizer.render([{"role": "user", "content": "x"}])
    assert text.encode() == b"\\xc3\\xa9\\xe6\\xbc\\xa2\\xf0\\x9f\\x99\\x82x", text
    tokenizer.save(directory / "saved")
print(text, "\\ud800")
"""


def run(*command: str, code: int = 0) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))} | ASCII
    command = (sys.executable, "-X", "warn_default_encoding", *command)
    done = subprocess.run(command, env=environ, capture_output=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr.decode()
    warned = [line for line in done.stderr.decode().splitlines() if "EncodingWarning" in line]
    ours = [line for line in warned if line.startswith(f"{PACKAGE}/")]
    assert ours == []
    return done.stdout.decode()


def test_templates_are_read_as_utf_8(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "tokenizer.model")
    for name in ("own.jinja", "chat_template.jinja"):
        (tmp_path / name).write_text(TEXT + "{{ messages[0].content }}", encoding="utf-8")
    assert run("-c", READS, str(tmp_path)) == "\\xe9\\u6f22\\U0001f642x \\ud800\n"


def test_commands_that_read_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, config={"data": {"prompt_key": TEXT + name}}) for name in "ab"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"data": {"prompt_key": TEXT}}, allow_unicode=True), "utf-8")
    found = json.loads(run("-m", "megarl", "compare", *map(str, runs), "--json"))
    assert found["differences"] == {"data.prompt_key": [f"{TEXT}a", f"{TEXT}b"]}
    run("-m", "megarl", "report", str(runs[0]))
    assert TEXT.encode() in (runs[0] / "report.html").read_bytes()
    shown = run("-m", "megarl", "config", str(tmp_path / "mine.yaml"), "data.prompt_key", code=2)  # keys are missing
    assert "value    \\xe9\\u6f22\\U0001f642   (" in shown
