"""Entry points run for real, but in processes forked from one that has imported everything: seconds, not half a minute.

The process is the only rank of a job, as a launcher would have made it; what it prints goes into a file.
"""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.programs import ROOT, SHOWN_CHARACTERS

ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port: nobody else has to find it


def run_forked(function: Callable[..., Any], *args: Any, log: Path, timeout_s: float) -> Any:
    """Call `function(*args)`, which must be importable, in such a process and return its answer.

    Raises AssertionError with the end of what it printed where it did not answer.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, log, function, args))
    process.start()
    theirs.close()  # so that the end of the process ends the wait
    try:
        if ours.poll(timeout_s):
            return ours.recv()
        cause = f"did not end within {timeout_s} s"
    except EOFError:
        cause = "ended without an answer"
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    raise AssertionError(f"{function.__name__} {cause}:\n{log.read_text()[-SHOWN_CHARACTERS:]}")


def _serve(connection: Connection, log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= ONLY_RANK | RENDEZVOUS | {"OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    torch.set_num_threads(1)
    connection.send(function(*args))
