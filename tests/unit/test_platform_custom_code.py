"""Files of a user are modules that any process can import by name."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.platform.custom_code import module_name, path_of, place_of
from megarl.platform.errors import UserError
from megarl.platform.functions import load_module
from tests.support.programs import ROOT


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_module_name_is_identifier_and_encodes_path(text: str) -> None:
    path = Path("/") / text
    name = module_name(path)
    assert path_of(name.rpartition(".")[2]) == path.absolute()
    assert all(part.isidentifier() for part in name.split("."))


@pytest.mark.parametrize("name", ["my_reward.py", "json.py", "a b-c.d.py", "__init__.py", "größe.py"])
def test_objects_of_user_file_unpickle_in_another_process(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("class Own:\n    pass\n\ndef double(x):\n    return 2 * x\n")
    module = load_module(file, key="own.path")
    code = "import pickle, sys; f, own = pickle.load(sys.stdin.buffer); print(f(21), type(own).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((module.double, module.Own())),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"42 Own\n"


def test_equal_names_of_two_files_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "own.py").write_text(f"NUMBER = {number}\n")
    found = [load_module(tmp_path / number / "own.py", key="own.path") for number in ("1", "2")]
    assert [module.NUMBER for module in found] == [1, 2]
    assert [sys.modules[module.__name__] for module in found] == found


def test_a_file_that_is_gone_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"megarl\.platform\.custom_code\."):
        __import__(module_name(tmp_path / "gone.py"))


@pytest.mark.parametrize(
    ("statement", "line", "text"),
    [
        ("a, b = 1, 2, 3", 4, "a, b = 1, 2, 3"),
        ("list(zip([1], [], strict=True))", 4, "list(zip([1], [], strict=True))"),
        ("int('x')", 4, "int('x')"),
        ("helper()", 2, "raise KeyError"),
    ],
)
def test_error_location_is_innermost_line_of_user_file(statement: str, line: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "a reward.py"
    file.write_text(f"def helper():\n    raise KeyError\ndef score():\n    {statement}\n")
    with pytest.raises((ValueError, KeyError)) as raised:
        load_module(file, key="own.path").score()
    assert place_of(raised.value) == f" ({file}:{line}, `{text}`)"


@pytest.mark.parametrize(
    "statement",
    [
        "raise ValueError('api_key=tsk9-4f1Wq8zLm2')",
        "dict(api_key='a plain word')[0]",
        "{'password': 'a plain word'}[0]",
        "int(' sk-proj-4f1Wq8zLm2Xk4f1Wq8zLm2Xk4f1Wq8zLm2Xk')",
    ],
)
def test_line_of_an_error_shows_no_secret(statement: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def score():\n    {statement}\n")
    with pytest.raises((ValueError, KeyError)) as raised:
        load_module(tmp_path / "own.py", key="own.path").score()
    found = place_of(raised.value)
    assert f"({tmp_path}/own.py:2" in found
    assert "4f1Wq8zLm2" not in found and "a plain word" not in found


def test_error_outside_user_files_has_no_location(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_module(tmp_path / "missing.py", key="own.path")
    assert place_of(raised.value) == ""


def test_file_load_failure_names_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(
        UserError, match=r"fails to load: ZeroDivisionError: division by zero \(.*own.py:2, `y = x / 0`\)"
    ):
        load_module(tmp_path / "own.py", key="own.path")
