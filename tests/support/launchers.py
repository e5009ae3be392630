"""Jobs under every launcher that a user may have."""

import os
import shutil
import subprocess
from collections.abc import Mapping

import pytest

from tests.support.programs import ROOT, hearing_hang_ups

NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is missing (apt: openmpi-bin)")


def outside_launchers() -> dict[str, str]:
    """Return the environment without the variables that launchers set."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


def start(command: list[str], *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command as if no launcher had started this process."""
    with hearing_hang_ups():
        return subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={**outside_launchers(), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
