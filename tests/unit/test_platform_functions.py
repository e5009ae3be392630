"""A function of a user's file: its signature without running the file, and the function."""

import inspect
import threading
from pathlib import Path

import pytest

from megarl.platform import slow_loads
from megarl.platform.functions import load_function, signature_in, takes, unmet
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_pool


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.py"
    path.write_text(text)
    return path


def test_a_signature_is_read_without_running_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "1 / 0\ndef f(a: Unknown, /, b=Unknown, *rest, c, d=1 / 0, **more) -> Unknown: ...\n")
    signature = signature_in(path, "f")
    assert signature is not None
    assert str(signature) == "(a, /, b=None, *rest, c, d=None, **more)"
    with pytest.raises(ValueError, match=r"own\.py fails to load: ZeroDivisionError"):
        load_function(path, "f", key="own.path")


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import f\n",
        "from elsewhere import *\n",
        "f = g = print\n",
        "@wrapped\ndef f(): ...\n",
        "if True:\n    def f(): ...\n",
        "def f(): ...\ndef f(a): ...\n",
    ],
)
def test_function_defined_at_run_time_has_unknown_signature(tmp_path: Path, text: str) -> None:
    assert signature_in(write(tmp_path, text), "f") is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(:\n", r"own\.py fails to load: SyntaxError"),
        ("\0", r"own\.py fails to load: "),
        ("raise SystemExit(0)\n", r"own\.py (has no function 'f'|fails to load: SystemExit: 0)"),
        ("def g(): ...\ndef h(): ...\n", r"own\.py has no function 'f'; it has g, h$"),
        ("", r"own\.py has no function 'f'; it has none$"),
    ],
)
def test_check_and_load_refuse_file_without_function(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        signature_in(write(tmp_path, text), "f")
    with pytest.raises(ValueError, match=r"own\.py (has no function 'f'; it has|fails to load: )"):
        load_function(tmp_path / "own.py", "f", key="own.path")


def test_what_is_no_python_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("def f(): ...\n")
    with pytest.raises(ValueError, match=r"^own.path: .*own.txt is not a Python file: name a file that ends with .py"):
        load_function(tmp_path / "own.txt", "f", key="own.path")
    with pytest.raises(ValueError, match=r"^own.path: no such file: .*absent.py"):
        load_function(tmp_path / "absent.py", "f", key="own.path")


def test_loaded_file_may_look_up_its_module(tmp_path: Path) -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\ndef f(): return A(b=3)\n"
    assert load_function(write(tmp_path, text), "f", key="own.path")().b == 3


@pytest.mark.parametrize(
    ("file", "text", "remedy"),
    [
        (
            "own.py",
            "from helper import VALUE\n",
            r": start the command with PYTHONPATH='.*a folder', and import it as helper$",
        ),
        ("own.py", "from .helper import VALUE\n", r"PYTHONPATH='.*a folder', and import it as helper$"),
        ("pack/own.py", "from .helper import VALUE\n", r"PYTHONPATH='.*a folder', and import it as pack\.helper$"),
        ("pack/own.py", "import absent_module\n", r"No module named 'absent_module' \(.*, `import absent_module`\)$"),
        ("pack/own.py", "import logs\n", r"No module named 'logs' \(.*, `import logs`\)$"),
    ],
)
def test_neighbour_that_is_not_found_has_a_remedy(file: str, text: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "a folder" / file
    (path.parent / "logs").mkdir(parents=True)
    path.write_text(text)
    for name in ("helper", "__init__") if path.parent.name == "pack" else ("helper",):
        path.with_name(f"{name}.py").write_text("VALUE = 1\n")
    with pytest.raises(ValueError, match=remedy):
        load_function(path, "f", key="own.path")


@pytest.mark.usefixtures("news_captured")
def test_file_that_loads_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_loads, "SILENT_S", 0.05)
    threads = threading.active_count()
    path = write(tmp_path, "import time\ntime.sleep(1)\ndef compute_score(**arguments): return 1.0\n")
    make_pool(RulesSection(), CustomRewardSection(path=str(path))).close()
    (message,) = caplog.messages
    assert message.startswith(f"custom_reward_function.path: {path} is still loading after 0.05 s: ")
    assert threading.active_count() == threads


def test_which_keywords_a_function_takes_and_lacks() -> None:
    def strict(a, /, b, *, c, d=1): ...  # type: ignore[no-untyped-def]

    def free(b, *rest, **more): ...  # type: ignore[no-untyped-def]

    signature = inspect.signature(strict)
    assert [name for name in "abcde" if takes(signature, name)] == ["b", "c", "d"]
    assert unmet(signature, {"a", "b"}) == ["a", "c"]
    assert takes(inspect.signature(free), "anything")
    assert unmet(inspect.signature(free), set()) == ["b"]
