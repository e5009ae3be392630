"""Prepare the process that ranks on the CPU are forked from: import what they need, do once what engines repeat.

Without a decision for the CPU, the first question for the device would ask CUDA, which does not survive the fork.
"""

import gc
from functools import cache
from importlib import import_module

import torch

from megarl.platform.device import decide_device
from megarl.rollout import patches

torch.set_num_threads(1)  # a thread would not survive the fork
decide_device("cpu")
patches.prepare_environment()

# vLLM reads the environment as it is imported.
from vllm.config.logging import LoggingConfig  # noqa: E402
from vllm.logger import configure_logging_if_needed  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

import megarl.config.load  # noqa: E402
import megarl.report.page  # noqa: E402
from megarl.config.root import Config  # noqa: E402

USED = (  # by a job of a few steps; each would be imported in every rank
    "alembic.command",
    "megarl.assembly.run",
    "megarl.learner.rotary",
    "megarl.rollout.destination",
    "megarl.rollout.reload",
    "megarl.tracking.mlflow",
    "megarl.tracking.mlflow_store",
    "megarl.train",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.torch",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "pyarrow.pandas_compat",
    "sqlalchemy.dialects.sqlite",
    "torch.profiler._cupti_monitor",
    "transformers",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
)
for name in USED:
    import_module(name)

configure_logging_if_needed(LoggingConfig())  # takes time that grows with the square of the number of loggers
megarl.config.load._adapter(Config)
megarl.report.page.library()
if current_platform.is_cpu():  # the worker disables CUDA in its process
    import_module("vllm.v1.worker.cpu_worker")
    import_module("vllm.v1.attention.backends.cpu_attn")

    # Each engine registers the same kernels, and searches all modules for them.
    current_platform.register_triton_kernel_overrides = cache(current_platform.register_triton_kernel_overrides)
    current_platform.register_triton_kernel_overrides()
gc.collect()
gc.freeze()  # a rank that collects garbage need not look at what is never garbage
