"""Which lines of megarl run on the hollow device: each process appends a line to a file when it first runs it."""

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "megarl"
PACKAGES = ("distributed", "learner", "platform", "reshard", "rollout", "weight_sync")


def record(file: str) -> None:
    """Record the lines of this process, unless the devices are hidden from it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    folders = tuple(f"{PACKAGE / package}{os.sep}" for package in PACKAGES)
    lines = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # forked processes share it

    def line(code: CodeType, number: int) -> Any:
        if code.co_filename.startswith(folders):
            os.write(lines, f"{os.path.relpath(code.co_filename, PACKAGE)}:{number}\n".encode())
        return monitoring.DISABLE  # the first time is enough

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "hollow")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
