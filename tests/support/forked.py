"""Real entry points in processes forked from one that has imported everything: seconds instead of half a minute.

The processes are the ranks of a job, as a launcher would have started them. They print to files.
"""

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from tests.support.programs import ROOT, SHOWN_CHARACTERS

ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port: no other rank needs to find it


def run_forked(function: Callable[..., Any], *args: Any, log: Path, timeout_s: float) -> Any:
    """Call `function(*args)`, which must be importable, in such a process and return its result.

    Raises AssertionError with the end of what the process printed if there is no result.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, log, function, args))
    process.start()
    theirs.close()  # so that the end of the process ends the wait
    try:
        if ours.poll(timeout_s):
            return ours.recv()
        cause = f"did not end within {timeout_s} s"
    except EOFError:
        cause = "ended without a result"
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    raise AssertionError(f"{function.__name__} {cause}:\n{log.read_text()[-SHOWN_CHARACTERS:]}")


class Job:
    """The ranks of a job on this machine. Each calls `function(*args)`, which must be importable."""

    def __init__(self, num_ranks: int, function: Callable[..., Any], *args: Any, log: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.preloaded"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as an agent keeps it
        agent = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        self.logs = [log.with_suffix(f".{rank}.txt") for rank in range(num_ranks)]
        self._ranks = []
        for rank, path in enumerate(self.logs):
            environ = agent | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_call, args=(environ, path, function, args))
            process.start()
            self._ranks.append(process)

    def finish(self, *, timeout_s: float) -> str:
        """Wait for all ranks and return what the first printed. Raises AssertionError if a rank fails."""
        code = self.end(timeout_s=timeout_s)
        assert code == 0, f"exit code {code}\n{self.printed()}"
        return self.logs[0].read_text()

    def end(self, *, timeout_s: float) -> int:
        """Wait until a rank fails or all succeed, kill what is left, and return the exit code of the failure or 0."""
        code = self._wait(lambda: all(rank.exitcode is not None for rank in self._ranks), timeout_s=timeout_s)
        self.kill()
        return code

    def end_alone(self, *, timeout_s: float) -> list[int]:
        """Wait until every rank ends, and return the exit codes."""
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.join(deadline - time.monotonic())
        codes = {rank.name: rank.exitcode for rank in self._ranks}
        self.kill()
        assert None not in codes.values(), f"{codes} after {timeout_s} s\n{self.printed()}"
        return [code for code in codes.values() if code is not None]

    def kill_when(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for the condition, then kill all ranks. Raises AssertionError if a rank ends before."""
        self._wait(condition, timeout_s=timeout_s)
        ended = [rank.exitcode for rank in self._ranks if rank.exitcode is not None]
        self.kill()
        assert not ended, f"exit codes {ended}\n{self.printed()}"

    def kill(self) -> None:
        """Kill what is left of the ranks."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()

    def printed(self) -> str:
        """Return the end of what every rank printed."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-SHOWN_CHARACTERS:]}" for path in self.logs)

    def _wait(self, condition: Callable[[], bool], *, timeout_s: float) -> int:
        """Wait for the condition or for a rank that fails; return its exit code or 0."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if failed := [rank.exitcode for rank in self._ranks if rank.exitcode]:
                return failed[0]
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not done within {timeout_s} s\n{self.printed()}")
            time.sleep(0.05)
        return next((rank.exitcode for rank in self._ranks if rank.exitcode), 0)


def run_job(num_ranks: int, main: Callable[..., Any], *arguments: object, log: Path, timeout_s: float) -> str:
    """Run `main(arguments)` on every rank of a job that must succeed, and return what the first rank printed."""
    return Job(num_ranks, main, list(map(str, arguments)), log=log).finish(timeout_s=timeout_s)


def _call(environ: dict[str, str], log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _settle(log, environ)
    function(*args)


def _serve(connection: Connection, log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _settle(log, ONLY_RANK | RENDEZVOUS)
    connection.send(function(*args))


def _settle(log: Path, environ: dict[str, str]) -> None:
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= environ | {"OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    torch.set_num_threads(1)
