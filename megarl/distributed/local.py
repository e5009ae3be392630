"""The ranks of one host on the CPU, forked from a process that has imported everything once.

Imports are most of the start of a job. Invariant: the process that the ranks are forked from does nothing else. It
reads no file of the user, calls nothing of CUDA and starts no thread of Python, because CUDA and threads do not survive
a fork.
"""

import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed import TCPStore

from megarl.distributed.failures import report_to
from megarl.distributed.place import Launch
from megarl.distributed.signals import EXIT_CODE, SIGNALS, forward
from megarl.platform.device import decide_device
from megarl.platform.forking import as_shell, flush, fork
from megarl.platform.imports import IMPORTING, import_modules
from megarl.platform.processes import die_with_parent
from megarl.platform.terminal import print_message

PATIENCE_S = 30.0
"""Seconds in which ranks end after SIGTERM, because another rank has failed."""
HOST = "127.0.0.1"
_ROUND_S = 0.05

logger = logging.getLogger(__name__)


def fork_ranks(num_ranks: int, imports: Sequence[str], *, threads: int) -> Launch:
    """Import the modules `imports`, fork the ranks of this host, and return in each of them its place.

    `threads` are those of the products of a rank.

    This process does not return: it watches the ranks, and ends with the code of the first that fails, or with 0.
    Each rank leads a session of its own, so that a terminal signals this process alone, which forwards the signal.
    """
    torch.set_num_threads(1)  # the threads of a pool would not survive the fork
    decide_device("cpu")
    if imports:
        logger.info(IMPORTING)
    import_modules(imports)
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    sizes = {name: str(num_ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= sizes | {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    failures, reason_of = os.pipe()
    ranks = dict[int, int]()
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for rank in range(num_ranks):
        pid = fork()
        if pid == 0:
            os.setsid()
            die_with_parent(signal.SIGKILL, parent=parent)
            listener.close()
            os.close(failures)
            report_to(reason_of)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            torch.set_num_threads(threads)
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(line_buffering=True)  # a job shows its steps as they end, also in a file
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return Launch(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
        ranks[pid] = rank
    forward()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.close(reason_of)
    code = _watch(ranks, store, failures)
    flush()
    os._exit(code)  # what was imported would take seconds to unload


def report_first(rank: int, code: int, reason: str = "") -> int:
    """Name the rank that failed first; return the exit code of the job.

    Args:
        rank: the rank that ended first.
        code: its exit code as Python counts it.
        reason: the line that a failing rank has left, if any.
    """
    is_killed = code < 0
    code = as_shell(code)
    if code != EXIT_CODE:  # otherwise a rank has printed the reason
        out_of_memory = "unless someone killed it, memory probably ran out (see dmesg)"
        cause = out_of_memory if code == as_shell(-signal.SIGKILL) else "its own messages are above"
        plain = f"megarl: rank {rank} failed first (exit code {code}); {cause}"
        print_message(plain if is_killed else reason or plain)
    return code


def _watch(ranks: dict[int, int], store: TCPStore, failures: int) -> int:
    """Wait for all ranks, and return the exit code of the job. If one fails, end the others.

    Args:
        ranks: the rank of each process.
        store: the store that they use, which lives as long as this call.
        failures: the pipe into which a failing rank writes why.
    """
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if rank is not None and code:
            _end(set(ranks))
            with os.fdopen(failures, encoding="utf-8") as reasons:
                return report_first(rank, code, reasons.readline().rstrip())
    return 0


def _end(pids: set[int]) -> None:
    """Ask processes of this process to end, and kill what is left after PATIENCE_S."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + PATIENCE_S
    while pids:
        pids = {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if pids and time.monotonic() > until:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            until = float("inf")
        time.sleep(_ROUND_S if pids else 0.0)
