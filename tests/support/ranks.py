"""Real processes for distributed tests: started once per module, used for worlds of any size up to theirs.

    with RankPool(4) as pool:
        answers = pool.run(2, function, argument)   # on ranks 0 and 1, each in a fresh gloo world of two

`function` must be importable. An exception on a rank is raised in the test with the rank's traceback.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 300


def _serve(rank: int, connection: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while (order := _next_order(connection)) is not None:
        world_size, store, function, args = order
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            answer = ("ok", function(*args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        if dist.is_initialized():
            if answer[0] == "ok":
                dist.barrier()  # a rank that leaves early would cut off one that is still in a collective
            dist.destroy_process_group()
        connection.send(answer)


@contextmanager
def world_of_one() -> Iterator[None]:
    """This process as the only rank."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def fresh_mesh(section: Any) -> Any:
    """Megatron's mesh over the world of this run; that of an earlier one is forgotten."""
    from megatron.core import parallel_state

    from megarl.learner.parallel import build_mesh

    parallel_state.destroy_model_parallel()
    return build_mesh(section)


def _next_order(connection: Any) -> Any:
    try:
        return connection.recv()
    except EOFError:  # the test process is gone
        return None


class RankPool:
    """Processes that wait for functions to run as the ranks of a world."""

    def __init__(self, num_processes: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.preloaded"])
        self._connections, self._processes = [], []
        for rank in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs))
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on the ranks of a new world and return their answers, in rank order."""
        with tempfile.TemporaryDirectory() as directory:
            connections = self._connections[:world_size]
            for connection in connections:
                connection.send((world_size, Path(directory) / "store", function, args))
            answers = []
            for rank, connection in enumerate(connections):
                if not connection.poll(TIMEOUT_S):
                    raise TimeoutError(f"rank {rank} of {world_size} did not answer {function.__name__}")
                answers.append(connection.recv())
        for rank, (state, answer) in enumerate(answers):
            if state == "error":
                raise AssertionError(f"rank {rank} of {world_size} failed in {function.__name__}:\n{answer}")
        return [answer for _, answer in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                connection.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
