"""Whether the same work gives the same bits every time on CUDA, decided once for a process, as the device is.

On the CPU it always does. On CUDA the fastest kernels add up numbers in the order in which threads happen to end.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # matrix products of streams that share a workspace differ
    "NCCL_ALGO": "^NVLS",  # switches add up in the order of arrival
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
}
_decided: list[bool] = []  # at most one


def decide_determinism(wanted: bool) -> None:
    """Decide, and set what CUDA's libraries read from the environment, unless the user has set it.

    Call it before anything runs on CUDA.
    """
    _decided[:] = [wanted]
    if wanted:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)


def is_deterministic() -> bool:
    """Return the decision; False before it."""
    return _decided == [True]


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch take only deterministic kernels within the block, if so decided.

    The block holds the learner's work. vLLM, in the same process, calls kernels that have no such variant.
    """
    if not is_deterministic():
        yield
        return
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
