"""Processes that serve as the ranks of tests, and stay alive from test to test.

    with RankPool() as pool:
        results = pool.run(2, function, argument)  # on ranks 0 and 1 of a new gloo world

`function` must be importable. An exception on a rank is raised in the test with the traceback of the rank. The ranks of
`RankPool("cuda")` join a world of NCCL, as in production. Each starts anew: CUDA does not survive a fork, and the
process that the other ranks are forked from imports code that disables CUDA.
"""

import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = {"cpu": 300, "cuda": 800}
"""How long a function may take: vLLM compiles for a GPU first, and a hollow device computes on a busy core."""


def _serve(rank: int, device: str, connection: Any) -> None:
    from megarl.distributed.exchange import join_world
    from megarl.platform.device import decide_device

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if decide_device(device) == "cuda":
        torch.cuda.set_device(rank)
    environ = dict(os.environ)
    while (order := _next_order(connection)) is not None:
        world_size, store, function, args = order
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        try:
            timeout = timedelta(seconds=TIMEOUT_S[device])
            join_world(init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
            result = ("ok", function(*args))
        except BaseException:
            result = ("error", traceback.format_exc())
        if dist.is_initialized():
            if result[0] == "ok":
                try:
                    dist.barrier()  # a rank that leaves early would cut off one that is still in a collective
                except RuntimeError:
                    result = ("cut off", traceback.format_exc())
            dist.destroy_process_group()
        _free_groups()
        os.environ.clear()
        os.environ.update(environ)  # the next test must not see what this one set
        connection.send(result)


def _free_groups() -> None:
    """Free the process groups of a test that is over, with their threads."""
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()
    gc.collect()


@contextmanager
def world_of_one() -> Iterator[None]:
    """Make this process the only rank of a world."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def fresh_mesh(section: Any) -> Any:
    """Return Megatron's mesh over the world of this test, and forget the mesh of an earlier test."""
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
    """Processes that wait for functions to run as the ranks of a world. They start when a world first needs them."""

    def __init__(self, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self._device = device
        self._context: Any = mp.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            self._context.set_forkserver_preload(["tests.support.preloaded"])
        self._ranks: list[tuple[Any, Any]] = []  # connection and process of each rank

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on the ranks of a new world and return the results in rank order.

        After a failure all processes are replaced, so that it does not reach the next test.
        """
        while len(self._ranks) < world_size:
            self._start()
        try:
            return self._run(world_size, function, args)
        except BaseException:
            self.kill()
            raise

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        results = []
        with tempfile.TemporaryDirectory() as directory:
            connections = [connection for connection, _ in self._ranks[:world_size]]
            for connection in connections:
                connection.send((world_size, Path(directory) / "store", function, args))
            for rank, connection in enumerate(connections):
                if not connection.poll(TIMEOUT_S[self._device]):
                    raise TimeoutError(f"rank {rank} of {world_size} did not finish {function.__name__}")
                results.append(connection.recv())
        for wrong in ("error", "cut off"):
            for rank, (state, result) in enumerate(results):
                if state == wrong:
                    raise AssertionError(f"rank {rank} of {world_size} failed in {function.__name__}:\n{result}")
        return [result for _, result in results]

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(len(self._ranks), self._device, theirs))
        process.start()
        theirs.close()  # so that `recv` notices a process that died
        self._ranks.append((ours, process))

    def kill(self) -> None:
        """End all processes; new ones start when they are needed."""
        for connection, process in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._ranks:
            if process.is_alive():
                connection.send(None)
            process.join(10)
        self.kill()
