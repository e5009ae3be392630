"""The store in which the ranks of a job find each other, new for every attempt.

torchrun's agent keeps its store over a restart (PyTorch 2.4 - 2.13, pytorch issue 135712), and with it the addresses of
the dead. How often an agent has started its ranks is no name for an attempt: agents on other hosts count differently.
So rank 0 chooses a name for it, and tells those ranks that ask with a word that was never said before.
"""

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.distributed.hosts import await_listener, describe_failure, resolve
from megarl.distributed.place import Launch

ROUND_S = 0.05


def meet(launch: Launch, host: str, port: int, *, timeout_s: float) -> Store:
    """Return a store that is empty but for what the ranks of this attempt write to it.

    Args:
        launch: this process's place.
        host: of rank 0, or of torchrun's agent beside it.
        port: where the store listens, or where rank 0 is to make it listen.
        timeout_s: seconds that a rank waits for another.

    Raises:
        RuntimeError: the others did not come in that time.
        ValueError: the host is not found or not reached, or its port is taken.
    """
    timeout, rank = timedelta(seconds=timeout_s), launch.rank
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = rank == 0 and not is_of_agent
    resolve(host)  # torch would look for minutes
    address = host if listens else await_listener(host, port, launch, timeout_s=timeout_s)
    try:
        store = TCPStore(address, port, launch.world_size, listens, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(describe_failure(error, host, port)) from error
    if not is_of_agent:
        return store
    word = uuid4().hex
    if rank == 0:
        room = PrefixStore(word, store)
        _answer(store, room, word, launch.world_size, until=time.monotonic() + timeout_s)
        return room
    store.set(f"megarl/asks/{rank}", word)
    room = PrefixStore(store.get(f"megarl/answers/{word}").decode(), store)
    room.add("arrived", 1)
    return room


def _answer(store: Store, room: Store, word: str, world_size: int, *, until: float) -> None:
    """Tell everyone who asks the word of this attempt, until all have come. The dead may have asked as well."""
    answered = set[str]()
    while room.add("arrived", 0) < world_size - 1:
        asking = [key for rank in range(1, world_size) if store.check([key := f"megarl/asks/{rank}"])]
        for asked in {store.get(key).decode() for key in asking} - answered:
            store.set(f"megarl/answers/{asked}", word)
            answered.add(asked)
        if time.monotonic() > until:
            raise RuntimeError(f"of {world_size} ranks, {room.add('arrived', 0) + 1} came")
        time.sleep(ROUND_S)
