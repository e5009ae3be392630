"""The option --detach: a training that outlives its terminal."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.distributed.place import Launch
from megarl.platform.detached import CONSOLE, start_detached
from megarl.platform.errors import UserError
from megarl.platform.terminal import visible

OPTION = "--detach"


def detach(module: str, argv: Sequence[str], directory: Path, launch: Launch | None) -> None:
    """Start the command `module` without --detach in a process of its own, and print how it is watched and ended.

    Raises:
        UserError: a launcher has started this process, and waits for it.
    """
    if launch:
        raise UserError(f"{OPTION} is for a run without a launcher: leave it out under torchrun, mpirun or srun")
    words = [word for word in argv if word != OPTION]
    process = start_detached([sys.executable, "-m", module, *words], directory)
    print(visible(f"process {process.pid} trains, also if this terminal closes; it prints into {directory / CONSOLE}"))
    print(visible(f"watch it with\n  megarl watch {shlex.quote(str(directory))}"))
    print(f"let it save and end with\n  kill {process.pid}")
