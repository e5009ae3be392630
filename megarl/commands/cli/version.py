"""The line that identifies an installation: megarl, its commit, and the engine."""

import subprocess
from pathlib import Path

import megarl
from megarl.platform.versions import ENGINES, found_among


def line() -> str:
    """Return the version of megarl, the commit that it is or was built from, and the installed engine."""
    package = Path(megarl.__file__).parent
    revision = built_from(package) or commit(package.parent)
    engine = " and ".join(map(" ".join, found_among(ENGINES).items())) or "no vLLM"
    return f"megarl {megarl.__version__}{f' (commit {revision})' if revision else ''}, {engine}"


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
