"""Imports of all that an engine on the CPU needs, also of what vLLM imports only when an engine starts.

For the process that ranks are forked from, which imports once what each of them would import again.
"""

from contextlib import suppress
from importlib import import_module

from megarl.rollout import patches

patches.prepare_environment()

# vLLM reads the environment as it is imported.
from vllm.platforms import current_platform  # noqa: E402

MODULES = (  # vLLM 0.32
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
if current_platform.is_cpu():
    for _name in ("megarl.rollout.destination", "megarl.rollout.engine", "megarl.rollout.reload", *MODULES):
        with suppress(ModuleNotFoundError):  # another version of vLLM
            import_module(_name)
with suppress(ImportError):  # vLLM 0.26 configures its loggers as it is imported
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())  # takes time that grows with the square of the number of loggers
