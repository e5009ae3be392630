"""The store through which the ranks of a job find each other, new for every attempt.

torchrun's agent keeps its store over a restart (PyTorch 2.4 - 2.13, pytorch issue 135712), with the addresses of dead
ranks. The restart count cannot name an attempt, because agents on other hosts count differently. Instead rank 0 chooses
a name for the attempt. Every other rank asks for it under a key that was never used before, and rank 0 answers.
"""

import hashlib
import os
import socket
import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.distributed.hosts import await_listener, describe_failure, own_address, resolve
from megarl.distributed.place import Launch
from megarl.platform.errors import UserError

ROUND_S = 0.05
MOMENT_S = 5.0
"""Seconds that a rank with an error waits for rank 0 to report the same error."""


def meet(launch: Launch, host: str, port: int, *, timeout_s: float) -> Store:
    """Return a store that has only entries of ranks of this attempt.

    Args:
        launch: this process's rank.
        host: of rank 0, or of torchrun's agent there.
        port: of the agent's store, or of the store that rank 0 starts.
        timeout_s: seconds that a rank waits for another rank.

    Raises:
        RuntimeError: other ranks did not join in time.
        UserError: the host cannot be found or reached, or its port is in use.
    """
    timeout = timedelta(seconds=timeout_s)
    rank = launch.rank
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = rank == 0 and not is_of_agent
    resolve(host)  # torch would try for minutes
    try:
        if listens:
            store = _listen(host, port, launch, timeout)
        else:
            address = await_listener(host, port, launch, timeout_s=timeout_s)
            store = TCPStore(address, port, launch.world_size, False, timeout, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise UserError(describe_failure(error, host, port)) from error
    if not is_of_agent:
        return store
    name = uuid4().hex
    if rank == 0:
        room = PrefixStore(name, store)
        _answer(store, room, name, launch.world_size, until=time.monotonic() + timeout_s)
        return room
    store.set(f"megarl/asks/{rank}", name)
    room = PrefixStore(store.get(f"megarl/answers/{name}").decode(), store)
    room.add("arrived", 1)
    return room


def _listen(host: str, port: int, launch: Launch, timeout: timedelta) -> Store:
    """Start the store at one address of this host. Left to itself, torch would listen on all interfaces.

    Raises:
        OSError: the port is in use.
    """
    address = own_address(host, launch)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    return TCPStore(
        address,
        listener.getsockname()[1],
        launch.world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reported_by_rank0(store: Store, message: str, launch: Launch) -> bool:
    """Return whether rank 0 has said, or says within a moment, what this rank is about to say.

    An error that all ranks find together is then printed once. If rank 0 finds no error, or has gone, each rank speaks.
    """
    key = f"megarl/said/{hashlib.sha256(message.encode(errors='backslashreplace')).hexdigest()}"
    try:
        if launch.rank == 0:
            store.set(key, "")
            return False
        store.wait([key], timedelta(seconds=MOMENT_S))
    except RuntimeError:  # nothing was said in time, or the store is out of reach
        return False
    return True


def _answer(store: Store, room: Store, name: str, world_size: int, *, until: float) -> None:
    """Give the name of this attempt to every rank that asks, until all have arrived. Dead ranks may have asked, too."""
    answered = set[str]()
    while room.add("arrived", 0) < world_size - 1:
        questions = (f"megarl/asks/{rank}" for rank in range(1, world_size))
        asking = [question for question in questions if store.check([question])]
        for key in {store.get(question).decode() for question in asking} - answered:
            store.set(f"megarl/answers/{key}", name)
            answered.add(key)
        if time.monotonic() > until:
            raise RuntimeError(f"only {room.add('arrived', 0) + 1} of {world_size} ranks have joined")
        time.sleep(ROUND_S)
