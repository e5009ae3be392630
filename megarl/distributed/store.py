"""The store in which the ranks of a job find each other, new for every attempt.

torchrun's agent keeps its store over a restart (PyTorch 2.4 - 2.13, pytorch issue 135712), and with it the addresses of
the dead. How often an agent has started its ranks is no name for an attempt: agents on other hosts count differently.
So rank 0 chooses a name for it, and tells those ranks that ask with a word that was never said before.
"""

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

ROUND_S = 0.05


def meet(rank: int, world_size: int, *, timeout_s: float) -> Store:
    """A store that is empty but for what the ranks of this attempt write to it.

    Args:
        rank: of this process.
        world_size: ranks of the job.
        timeout_s: seconds that a rank waits for another.

    Raises:
        RuntimeError: the others did not come in that time.
    """
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # rank 0 has made it
    word = uuid4().hex
    if rank == 0:
        room = PrefixStore(word, store)
        _answer(store, room, word, world_size, until=time.monotonic() + timeout_s)
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
