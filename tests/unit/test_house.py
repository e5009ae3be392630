"""The guards have no holes: tools see every file, functions and files stay short, test modules stand alone."""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from mypy.main import process_options
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.size import num_tokens
from tests.support.programs import ROOT, succeed

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FUNCTION_TOKENS, MAX_HABITS = 600, 80, 700, 6
MAX_TEST_WORDS = 8
SCREEN = Path("megarl/platform/screen.py")
TESTS = ("tests.unit", "tests.ranks", "tests.e2e", "tests.gpu", "tests.cluster", "tests.hollow.test_")


def listed(*command: str) -> set[Path]:
    """Return the Python files that a command prints, relative to the root of the checkout."""
    return {Path(os.path.relpath(line, ROOT)) for line in succeed(*command, timeout_s=60).splitlines()}


@pytest.fixture(scope="module")
def tracked() -> set[Path]:
    try:
        return {path for path in listed("git", "ls-files", "*.py") if (ROOT / path).exists()}
    except (AssertionError, FileNotFoundError):
        pytest.skip("not a checkout of git")


@pytest.fixture(scope="module")
def trees(tracked: set[Path]) -> dict[Path, ast.Module]:
    return {path: ast.parse((ROOT / path).read_text()) for path in tracked}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of all modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_ruff_sees_every_file(tracked: set[Path]) -> None:
    assert tracked - listed(sys.executable, "-m", "ruff", "check", "--show-files") == set()


def test_mypy_sees_every_file(tracked: set[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sources, _ = process_options(["--config-file", "pyproject.toml"])
    assert tracked - {Path(source.path) for source in sources if source.path} == set()


def test_files_and_functions_are_short(trees: dict[Path, ast.Module]) -> None:
    long = []
    for path, tree in trees.items():
        if (lines := (ROOT / path).read_text().count("\n")) > MAX_FILE_LINES:
            long.append(f"{path} has {lines} lines, more than {MAX_FILE_LINES}")
        for function in functions(tree):
            assert function.end_lineno
            if (lines := function.end_lineno - function.lineno + 1) > MAX_FUNCTION_LINES:
                long.append(f"{path}: {function.name} has {lines} lines, more than {MAX_FUNCTION_LINES}")
            tokens = sum(num_tokens(ast.unparse(statement)) for statement in function.body)  # without tables of cases
            if tokens > MAX_FUNCTION_TOKENS:
                long.append(f"{path}: {function.name} has {tokens} tokens, more than {MAX_FUNCTION_TOKENS}")
    assert long == []


RETIRED = {  # identifier -> the field's word for it
    "blot": "redact",
    "cargo": "buffers",
    "carried": "in_flight",
    "circle": "group",
    "drawing": "sampling",
    "keeper": "supervisor",
    "lesson": "batch",
    "ledger": "log",
    "obey": "handle",
    "onward": "forwarded",
    "opinions": "outputs",
    "said": "message",
    "signposts": "next_steps",
    "talker": "engine",
}


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module binds or uses: variables, arguments, attributes, functions, classes."""
    for node in ast.walk(tree):
        for field in ("name", "id", "arg", "attr"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def test_identifiers_are_the_words_of_the_field(trees: dict[Path, ast.Module]) -> None:
    found = {
        f"{path}: {name}: write {RETIRED[word]}"
        for path, tree in trees.items()
        if path.parts[0] in ("megarl", "benchmarks", "examples", "tools")
        for name in names_in(tree)
        for word in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
        if word in RETIRED
    }
    assert found == set()


def test_no_argument_of_a_call_binds_a_name(trees: dict[Path, ast.Module]) -> None:
    found = {
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if path.parts[0] == "megarl"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords))
        if isinstance(argument, ast.NamedExpr)
    }
    assert found == set()


def test_names_of_tests_are_short(trees: dict[Path, ast.Module]) -> None:
    names = {
        f"{path}: {function.name}"
        for path, tree in trees.items()
        if path.parts[0] == "tests"
        for function in functions(tree)
        if function.name.startswith("test_") and function.name.count("_") > MAX_TEST_WORDS
    }
    assert names == set()


def test_cases_that_the_makefile_names_exist(trees: dict[Path, ast.Module]) -> None:
    """Pytest runs nothing if a case is missing."""
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)\[([^]]+)]", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert named
    for path, name, case in named:
        found = [function for function in functions(trees[Path(path)]) if function.name == name]
        assert [function.name for function in found] == [name], path
        ids = {node.value for node in ast.walk(found[0]) if isinstance(node, ast.Constant)}
        assert case in ids, f"{path}::{name} has no case {case}"


def test_no_class_name_is_given_twice(trees: dict[Path, ast.Module]) -> None:
    files: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if path.parts[0] == "megarl" and isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_no_test_module_imports_another(trees: dict[Path, ast.Module]) -> None:
    """Test modules share code through tests/support."""
    found = {
        f"{path} imports {name}"
        for path, tree in trees.items()
        if path.parts[0] == "tests"
        for name in imported(tree)
        if name.startswith(TESTS)
    }
    assert found == set()


def test_no_text_reaches_a_terminal_as_markup(trees: dict[Path, ast.Module]) -> None:
    """A `Screen` shows strings as they are written, and `plain` makes texts of rich."""
    makers = {"rich.print", "rich.get_console", "rich.console.Console", "rich.text.Text", "rich.prompt.Prompt"}
    ours = {path: tree for path, tree in trees.items() if path.parts[0] == "megarl"}
    assert makers & set(imported(ours[SCREEN])) == {"rich.console.Console", "rich.text.Text"}
    found = [
        f"{path}: {name}"
        for path, tree in ours.items()
        if path != SCREEN
        for name in imported(tree)
        if name in makers - {"rich.text.Text"} or name.startswith("rich.markup")
    ]
    for path, tree in ours.items():
        for node in ast.walk(tree) if path != SCREEN else ():
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if (name == "Text" and (node.args or node.keywords)) or name.startswith("Text."):
                found.append(f"{path}:{node.lineno}: {name}(...) instead of plain(...)")
            if name.endswith("TextColumn") and all(ast.unparse(word) != "markup=False" for word in node.keywords):
                found.append(f"{path}:{node.lineno}: {name} reads markup")
            if any(ast.unparse(keyword) == "markup=True" for keyword in node.keywords):
                found.append(f"{path}:{node.lineno}: markup=True")
    assert found == []


def opens_text(call: ast.Call) -> bool:
    """Return whether a call reads or writes text, unless it only seems to."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in ("read_text", "write_text"):
        return bool(owner)  # a function of this name may be ours
    if owner == "subprocess":
        return any(ast.unparse(word) in ("text=True", "universal_newlines=True") for word in call.keywords)
    words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    modes = [mode for mode in modes if set(mode) <= set("rwaxbt+")]
    if name not in ("open", "fdopen") or any("b" in mode for mode in modes):
        return False
    return bool(modes) or (name == "open" and not owner)


def test_every_text_file_is_opened_with_explicit_encoding(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if path.parts[0] in ("megarl", "scripts")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and opens_text(node) and all(word.arg != "encoding" for word in node.keywords)
    ]
    assert found == []


def test_prose_is_plain() -> None:
    """The script knows the crudest habits only; an exception or two may be right."""
    counts = [line.split(maxsplit=1) for line in succeed(sys.executable, "scripts/prose.py", timeout_s=60).splitlines()]
    assert counts
    assert [habit for count, habit in counts if int(count) > MAX_HABITS] == []


def test_every_import_of_the_package_is_declared(trees: dict[Path, ast.Module]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    declared = {canonicalize_name(Requirement(line).name) for line in chain(project["dependencies"], *extras)}
    homes = packages_distributions()
    modules = {
        name.partition(".")[0] for path, tree in trees.items() if path.parts[0] == "megarl" for name in imported(tree)
    }
    of_others = {name for name in modules if name in homes and name != "megarl"}
    assert {name for name in of_others if not declared & set(map(canonicalize_name, homes[name]))} == set()


PRINTS = {  # results of commands, the last words of a process, and the output that a worker's supervisor reads
    *("commands", "report", "planning/engine_cost.py"),
    *("distributed/failures.py", "distributed/local.py", "distributed/watchdog.py", "platform/secrets.py"),
    "platform/terminal.py",
    *("environments/host.py", "rewards/http.py"),
}


def test_only_results_and_last_words_are_printed(trees: dict[Path, ast.Module]) -> None:
    """Everything else goes through the log, which has levels and a file."""
    printing = {
        path.relative_to("megarl").as_posix()
        for path, tree in trees.items()
        if path.parts[0] == "megarl" and len(path.parts) > 2
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "print_message")
    }
    assert {name for name in printing if not any(name.startswith(allowed) for allowed in PRINTS)} == set()
