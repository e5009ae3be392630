"""The smallest run that a signal stops: `python -m tests.support.stoppable DIRECTORY [busy|stuck]`.

Its two ranks run until they get a signal, and record in DIRECTORY what they did. With `busy` and `stuck` its first step
never ends, in Python or in collectives. A second attempt under torchrun ends at once.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.commands.entry import JobProgram, run
from megarl.distributed.launch import Launch
from megarl.distributed.signals import Stopped, graceful_stop, stop_requested
from megarl.tracking.config import TrainerSection


@dataclass(frozen=True, kw_only=True)
class Options:
    """The configuration of an entry point."""

    directory: Path
    how: str
    trainer: TrainerSection


def load(argv: Sequence[str], *, world_size: int | None) -> Options:
    trainer = TrainerSection(n_gpus_per_node=2, device="cpu", default_local_dir=argv[0])
    return Options(directory=Path(argv[0]), how=argv[1] if len(argv) > 1 else "", trainer=trainer)


def body(options: Options, launch: Launch) -> None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    with graceful_stop():
        (options.directory / f"began_{launch.rank}").write_text(f"{os.getpid()}\n")
        for step in count(1):
            time.sleep(0.01)
            while options.how == "busy" and launch.rank == 0:
                time.sleep(0.01)
            if options.how == "stuck" and launch.rank == 0:
                dist.recv(torch.zeros(1), src=1)
            dist.barrier()
            if stop_requested():
                (options.directory / f"saved_{launch.rank}").write_text(str(step))
                raise Stopped(step)


if __name__ == "__main__":
    run(JobProgram(module="tests.support.stoppable", load=load, body=body), sys.argv[1:])
