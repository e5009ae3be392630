"""The layout of any rank of vLLM's model, traced in one process, in a world that sends nothing."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.reshard.layout import Layout
from megarl.reshard.quantised import KEY
from megarl.rollout import patches
from megarl.rollout.arguments import engine_settings, llm_arguments
from megarl.rollout.config import RolloutSection


def offline_layout(model_dir: Path, *, tp_rank: int, tp_size: int, expert_parallel: bool, dtype: str) -> Layout:
    """Return the layout of one rank of an engine that need not exist. The process must have no process group."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megarl.rollout.layout import trace

    architecture = read_architecture(json.loads((model_dir / "config.json").read_text()))
    arguments = llm_arguments(
        RolloutSection(tensor_model_parallel_size=tp_size, dtype=dtype),
        model_dir=model_dir,
        max_model_len=128,
        trust_remote_code=False,
        on_cpu=True,
        overrides=engine_settings(architecture),
    )
    with patches.start_isolated(), silent_world(tp_rank, tp_size) as start_parallel_state:
        config = EngineArgs(**arguments, enable_expert_parallel=expert_parallel).create_engine_config()
        with set_current_vllm_config(config):
            start_parallel_state()
            with set_default_torch_dtype(getattr(torch, dtype)):
                model = initialize_model(vllm_config=config)
            record_metadata_for_reloading(model)
            vars(model.config).pop(KEY, None)  # as the engine does for gpt-oss
            return trace(model, hf_shapes(architecture), torch.device("cpu")).pieces


@contextmanager
def silent_world(rank: int, world_size: int) -> Iterator[Any]:
    """Make this process a rank of a world of tensor-parallel ranks, and yield what starts vLLM's groups in it."""
    from vllm.distributed import parallel_state

    new_group, new_parallel_group = dist.new_group, parallel_state.init_model_parallel_group

    def silent_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **(kwargs | {"backend": "fake"}))

    def unconnected_group(*args: Any, **kwargs: Any) -> Any:
        channels = {"use_device_communicator": False, "use_message_queue_broadcaster": False}
        return new_parallel_group(*args, **(kwargs | channels))

    def start_parallel_state() -> None:
        parallel_state.init_distributed_environment(world_size, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(world_size)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as patches:
            patches.enter_context(patch.dict("os.environ", RANK=str(rank), LOCAL_RANK=str(rank)))
            patches.enter_context(patch.object(dist, "new_group", silent_group))
            patches.enter_context(patch.object(parallel_state, "init_model_parallel_group", unconnected_group))
            patches.enter_context(patch.object(parallel_state, "in_the_same_node_as", lambda *_: [True] * world_size))
            yield start_parallel_state
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        parallel_state._group_name_counter.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
