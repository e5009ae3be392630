"""The images are as their headers promise: small, reproducible, for any user; and the context has no outputs."""

import fnmatch
import json
import re
from pathlib import Path

import pytest

from megarl.tracking.config import TrainerSection

ROOT = Path(__file__).parents[2]
GPU, CPU = (ROOT / "docker" / name for name in ("Dockerfile", "Dockerfile.cpu"))
SETUP = "scripts/setup.sh"
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments, without comments, on one line each."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions(path):
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def of(stage: list[tuple[str, str]], wanted: str) -> list[str]:
    return [rest for name, rest in stage if name == wanted]


@pytest.mark.parametrize("path", [GPU, CPU], ids=lambda path: path.name)
def test_image_pins_releases_and_removes_package_lists(path: Path) -> None:
    named = [rest for name, rest in instructions(path) if name in ("FROM", "ARG") and "/" in rest or ":" in rest]
    assert named and not [rest for rest in named if rest.endswith(":latest")]
    installs = [rest for name, rest in instructions(path) if name == "RUN" and "apt-get install" in rest]
    assert installs
    for install in installs:
        assert "--no-install-recommends" in install and install.endswith("rm -rf /var/lib/apt/lists/*")


@pytest.mark.parametrize("path", [GPU, CPU], ids=lambda path: path.name)
def test_container_runs_as_user_with_home(path: Path) -> None:
    last = stages(path)[-1]
    assert of(last, "USER") == ["megarl"]
    environment = " ".join(of(last, "ENV"))
    assert "HOME=/home/megarl" in environment and "USER=megarl" in environment
    assert not of(last, "HEALTHCHECK")
    labels = " ".join(of(last, "LABEL"))
    assert all(f"org.opencontainers.image.{key}=" in labels for key in ("title", "description", "licenses"))


def test_gpu_image_command_receives_signals_directly() -> None:
    [entry], [command] = (of(stages(GPU)[-1], name) for name in ("ENTRYPOINT", "CMD"))
    assert [json.loads(entry), json.loads(command)] == [["megarl"], ["doctor"]]  # lists: no shell in between


def test_compilers_are_left_out_and_build_jobs_configurable() -> None:
    build, final = stages(GPU)
    [compiling] = [run for run in of(build, "RUN") if "gpu-source.txt" in run]
    settings = dict(re.findall(r"(\w+)=(\S+)", compiling))
    assert settings["MAX_JOBS"] == "$MAX_JOBS" and settings["APEX_PARALLEL_BUILD"] == "1"
    assert settings["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"  # no binary that no lock knows
    assert settings["NVTE_WITH_NCCL_EP"] == "0"  # needs a newer NCCL than the lock has
    assert "devel" in of(build, "FROM")[0] and "-base-" in of(final, "FROM")[0]
    assert of(build, "FROM")[0].split(":")[1].split("-")[0] == of(final, "FROM")[0].split(":")[1].split("-")[0]
    installed = " ".join(of(final, "RUN")).split()
    needed = {"libibverbs1", "ibverbs-providers", "librdmacm1", "gcc", "python3.12-dev"}
    assert needed < set(installed)


def test_code_change_reinstalls_no_package() -> None:
    """`make setup` imports megarl, so it needs all files; the layer before it needs the lock and the script alone."""
    steps = [f"{name} {rest.replace('--chown=megarl ', '')}" for name, rest in stages(CPU)[-1]]
    packages, copied, setup = map(steps.index, (f"RUN PYTHON=$PYTHON {SETUP} packages", "COPY . .", "RUN make setup"))
    assert packages < copied < setup
    assert [step for step in steps[:copied] if step.startswith("COPY")] == [
        "COPY requirements/cpu.lock requirements/",
        f"COPY {SETUP} scripts/",
    ]


def test_user_outputs_are_excluded_from_build_context() -> None:
    def is_ignored(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in IGNORED)

    outputs = {TrainerSection().default_local_dir.split("/")[0], "mlruns", "runs", "data", "models", "samples", "wandb"}
    outputs |= {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert sorted(name for name in outputs if not is_ignored(name)) == []
    tracked = ["megarl/models", "megarl/data", "configs/models", "docs", "requirements", "scripts", "tests"]
    assert not [name for name in tracked if name in IGNORED or f"**/{name.split('/')[-1]}" in IGNORED]
