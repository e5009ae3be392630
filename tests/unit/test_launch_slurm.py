"""The Slurm script with substitutes for `srun` and `scontrol`; tests/cluster runs it on a real Slurm."""

import os
import subprocess
from pathlib import Path

import pytest

from megarl.distributed.signals import EXIT_CODE

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
exit $CODE
"""


def submit(root: Path, code: int, **variables: str) -> tuple[int, list[str]]:
    """Run the script with an `srun` that exits with `code`; return the exit code of the script and its calls."""
    for name, own in (("srun", str(code)), ("scontrol", "0")):
        (root / name).write_text(STAND_IN.replace("$CODE", own))
        (root / name).chmod(0o755)
    calls = root / "calls"
    slurm = {"SUBMIT_DIR": str(ROOT), "JOB_ID": "41", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "8", **variables}
    environ = {f"SLURM_{name}": value for name, value in slurm.items()}
    environ |= {"PATH": f"{root}:{os.environ['PATH']}", "CALLS": str(calls), "PYTHON": "python"}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "launch_slurm.sh", "run.yaml", "a.b=c d"], env=os.environ | environ, check=False
    )
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, EXIT_CODE, 137])
def test_job_is_requeued_only_after_graceful_stop(tmp_path: Path, code: int) -> None:
    ended, calls = submit(tmp_path, code)
    assert ended == code
    job = "python -m megarl.commands.train run.yaml a.b=c d trainer.nnodes=2 trainer.n_gpus_per_node=8"
    assert calls[0].startswith("srun ") and calls[0].endswith(job)
    assert calls[1:] == (["scontrol requeue 41"] if code == EXIT_CODE else [])


def test_job_of_an_array_is_requeued_alone(tmp_path: Path) -> None:
    calls = submit(tmp_path, EXIT_CODE, ARRAY_JOB_ID="40", ARRAY_TASK_ID="0")[1]
    assert calls[1:] == ["scontrol requeue 40_0"]
