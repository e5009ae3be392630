"""Checks of installed modules: they import, and they have bytecode."""

import importlib
import importlib.util
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from megarl.platform.finding import Finding

NOT_INSTALLED = "not installed"
REINSTALL = "run `make setup` (CPU) or install the extra `gpu` of pyproject.toml"


def import_findings(modules: Sequence[str]) -> list[Finding]:
    """Import the modules that a training imports: packages may all be there and yet not fit each other."""
    problems = {module: import_problem(module) for module in modules}
    faults = [Finding(module, problem, REINSTALL, "fault") for module, problem in problems.items() if problem]
    return faults or [Finding("imports of a training", "work")]


def bytecode_findings(modules: Sequence[str]) -> list[Finding]:
    """Check that the installed `modules` have bytecode. pip writes it, and uv leaves it to the first import.

    An import writes none if PYTHONDONTWRITEBYTECODE is set, or if the user may not write to the packages.
    """
    specs = {name: importlib.util.find_spec(name) for name in modules if _is_installed(name)}
    bare = [name for name, spec in specs.items() if spec and spec.cached and not Path(spec.cached).exists()]
    if not bare:
        return [Finding("bytecode", "complete")]
    compiling = shlex.join([sys.executable, "-m", "compileall", "-q", sysconfig.get_path("purelib")])
    advice = (
        "each process compiles what it imports, for many seconds: run the command below as the owner of the packages"
    )
    return [Finding("bytecode", f"none of {', '.join(bare)}", advice, "note", compiling)]


def import_problem(module: str) -> str | None:
    """Return why `module` cannot be imported, or None. Modules fail in many more ways than by an ImportError."""
    try:
        importlib.import_module(module)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        return NOT_INSTALLED if is_missing else f"does not import: {first_line(error)}"
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).split("\n", maxsplit=1)[0]
