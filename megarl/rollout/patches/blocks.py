"""The KV cache as seen from outside: the moment it is there, and the blocks of a request before they are freed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from megarl.platform.patching import replace, replaced
from megarl.rollout.patches.releases import declare_vllm

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase as Worker

FREEING = declare_vllm(
    "vllm.v1.core.sched.scheduler:Scheduler",
    "_free_request_blocks",
    reason="routes lie in the slots of the keys, and vLLM's own store of them needs its second model runner",
    upstream="vllm/v1/core/sched/scheduler.py: Scheduler._free_request_blocks",
    until="vLLM returns the routes of requests that are stopped, with every model runner",
)
READY = declare_vllm(
    "vllm.v1.worker.worker_base:WorkerWrapperBase",
    "initialize_from_config",
    reason="routers must tell their choice before CUDA graphs are captured, into a store as large as the KV cache",
    upstream="vllm/v1/worker/gpu/model_runner.py: the binding of vLLM's own store",
    until="vLLM returns the routes of requests that are stopped, with every model runner",
)


def cache_ready(call: Callable[["Worker"], None]) -> AbstractContextManager[None]:
    """Call `call` with the worker of an engine that starts within the block, as soon as it has a KV cache."""
    original = READY.original("initialize_from_config")

    def initialize(wrapper: Any, *args: object) -> None:
        original(wrapper, *args)
        call(wrapper.worker)

    return replaced(READY, initialize_from_config=initialize)


def note_freed_blocks(note: Callable[[str, list[int]], None]) -> None:
    """Call `note` with the name of a request and its blocks, in their order, before they are freed."""
    original = FREEING.original("_free_request_blocks")

    def free_request_blocks(scheduler: Any, request: Any) -> None:
        note(request.request_id, list(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]))
        original(scheduler, request)

    replace(FREEING, _free_request_blocks=free_request_blocks)
