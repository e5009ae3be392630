"""Prepare the process that ranks on the CPU are forked from: import what they need, do once what engines repeat.

Without a decision for the CPU, the first question for the device would ask CUDA, which does not survive the fork.
"""

import gc
from functools import cache

import torch

from megarl.platform.device import decide_device
from megarl.rollout import patches

torch.set_num_threads(1)  # a thread would not survive the fork
decide_device("cpu")
patches.prepare_environment()

# vLLM reads the environment as it is imported.
import mlflow.store.tracking.sqlalchemy_store  # noqa: E402, F401
import transformers  # noqa: E402, F401
import vllm.entrypoints.llm  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

import megarl.assembly.run  # noqa: E402
import megarl.rollout.destination  # noqa: E402
import megarl.rollout.reload  # noqa: E402
import megarl.tracking.mlflow_store  # noqa: E402, F401

if current_platform.is_cpu():  # the worker disables CUDA in its process
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # Each engine registers the same kernels, and searches all modules for them.
    current_platform.register_triton_kernel_overrides = cache(current_platform.register_triton_kernel_overrides)
    current_platform.register_triton_kernel_overrides()
gc.collect()
gc.freeze()  # a rank that collects garbage need not look at what is never garbage
