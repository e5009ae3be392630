"""Every change megarl makes to Megatron-Core and to torch under it, with the versions it was needed in and why.

The one to the writer of checkpoints is in shard_files.py.
"""

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.distributed.checkpoint import filesystem as checkpoint_files

from megarl.distributed.exchange import together
from megarl.learner.latent import DownProjection
from megarl.learner.shard_files import write_in_this_process
from megarl.platform.files import inside

FORCE_DATA_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
INDEX_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
INDEX_NAMES = (
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
)


def apply_patches() -> None:
    """Install the patches this machine needs; calling it again changes nothing."""
    if not torch.cuda.is_available():
        _keep_random_state()
        _hand_out_counts_on_the_cpu()
        _exchange_unequal_parts_over_gloo()
        _accept_whole_down_projections()
    _route_without_transformer_engine()
    _leave_whole_queries_alone()
    _load_state_of_torch_optimizers()
    _exchange_shapes_in_order()
    write_in_this_process()


@contextmanager
def reading_data_only() -> Iterator[None]:
    """torch 2.11, 2.13: a sharded checkpoint's index is a pickle, and its small objects are loaded as any pickle.

    Within the block both may name only the types that torch itself puts there, so reading a checkpoint calls no code;
    one that names something else is an error, and so is an index that leads to files of other directories.
    """
    forced = os.environ.get(FORCE_DATA_ONLY)
    os.environ[FORCE_DATA_ONLY] = "1"
    files: Any = checkpoint_files
    files.pickle = SimpleNamespace(load=load_index)
    try:
        yield
    finally:
        files.pickle = pickle
        if forced is None:
            del os.environ[FORCE_DATA_ONLY]
        else:
            os.environ[FORCE_DATA_ONLY] = forced


@contextmanager
def first_rank_failing_with_all() -> Iterator[None]:
    """megatron-core 0.16.1, 0.19.2: rank 0 alone writes a checkpoint's index, and the others wait in a collective.

    Where the disk does not take it, rank 0 goes on to the end of the block, and there the error is raised on all ranks.
    0.16.1 also has it write the objects that all ranks share, through torch, which does not say why it cannot.
    """
    errors: list[OSError] = []

    def attempt(write: Any, *args: Any) -> None:
        try:
            write(*args)
        except OSError as error:
            errors.append(error)

    def finish(self: Any, *args: Any) -> None:
        attempt(partial(original, self), *args)

    def save_common(self: Any, state: Any, directory: Any) -> None:
        if dist.get_rank() == 0:
            data = io.BytesIO()
            torch.save(state, data)
            attempt((Path(directory) / common.COMMON_STATE_FNAME).write_bytes, data.getbuffer())

    original = FileSystemWriterAsync.finish
    with ExitStack() as patched:
        if strategy := getattr(common, "TorchCommonSaveStrategy", None):
            patched.enter_context(patch.object(strategy, "save_common", save_common))
        patched.enter_context(patch.object(FileSystemWriterAsync, "finish", finish))
        patched.enter_context(patch.object(serialization, "save_config", partial(attempt, serialization.save_config)))
        yield
    together(lambda: _raise_first(errors))


def _raise_first(errors: list[OSError]) -> None:
    for error in errors:
        raise error


def load_index(file: Any) -> Any:
    """Return the index of a sharded checkpoint, which is a pickle.

    Raises:
        pickle.UnpicklingError: it names something else than records of torch's.
        ValueError: it leads to files of other directories.
    """
    index = _IndexUnpickler(file).load()
    for place in index.storage_data.values():
        inside(Path(), place.relative_path)
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in INDEX_MODULES else None
        is_record = isinstance(found, type) and found.__module__ == module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_record or is_dtype or (module, name) in INDEX_NAMES):
            raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which is no record of torch's")
        return super().find_class(module, name)


def _keep_random_state() -> None:
    """megatron-core 0.16.1, 0.19.2: random states are swapped by callbacks that wait for CUDA.

    Without CUDA they never run and pile up, one per forked region. Nothing is drawn in those regions here: weights come
    from files, and there is no dropout.
    """

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        return None

    def fork(self: Any, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    megatron_random.CudaRNGStatesTracker.fork = fork
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _hand_out_counts_on_the_cpu() -> None:
    """megatron-core 0.16.1, 0.19.2: the numbers of tokens that experts exchange become host numbers only from CUDA.

    As CPU tensors they stay what they are, and `all_to_all_single` does not take tensors as sizes.
    """

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _exchange_unequal_parts_over_gloo() -> None:
    """megatron-core 0.16.1, 0.19.2: ranks that share experts gather unequal numbers of tokens; gloo cannot."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if getattr(gather, "is_patched", False):
        return

    def gather_parts(part: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None:
            return gather(part, group, None, use_global_buffer)
        size, whole = group.size(), part.new_empty(sum(output_split_sizes), *part.shape[1:])
        dist.all_to_all_single(whole, torch.cat([part] * size), output_split_sizes, [len(part)] * size, group=group)
        return whole

    def sum_parts(whole: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None:
            return reduce_scatter(whole, group, None, use_global_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    gather_parts.is_patched = True  # type: ignore[attr-defined]
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_parts, sum_parts


def _accept_whole_down_projections() -> None:
    """megatron-core 0.16.1, 0.19.2: latent attention takes a whole down-projection only from Transformer Engine."""
    multi_latent_attention.TELinear = DownProjection


def _route_without_transformer_engine() -> None:
    """megatron-core 0.16.1: the router reads a name that exists only where Transformer Engine does."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _leave_whole_queries_alone() -> None:
    """megatron-core 0.19.2: latent attention normalises queries that it does not compress; DeepSeek does not."""
    if not find_spec("megatron.core.transformer.mla_qk_norm_config"):
        return
    resolver = import_module("megatron.core.transformer.mla_qk_norm_config").QKNormConfigResolver
    original = resolver._mla_fused_linear_or_default
    if getattr(original, "is_patched", False):
        return

    def fused_or_plain(self: Any, module: Any, name: str) -> Any:
        return module if name == "linear_q_proj" else original(self, module, name)

    fused_or_plain.is_patched = True  # type: ignore[attr-defined]
    resolver._mla_fused_linear_or_default = fused_or_plain


def _load_state_of_torch_optimizers() -> None:
    """megatron-core 0.16.1, 0.19.2: loading the distributed optimizer asks the checkpoint for AdamW's `step` tensors.

    The checkpoint has one step for all, which is set before; what it does not have keeps its value. Transformer Engine
    and apex keep the step elsewhere and are not affected.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "is_patched", False):
        return

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, self._get_main_param_and_optimizer_states(model_param) | tensors)

    set_states.is_patched = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _exchange_shapes_in_order() -> None:
    """megatron-core 0.16.1, 0.19.2: in a virtual pipeline of two stages each is before and after the other one.

    The tensors then travel in two groups, one for each direction, but their shapes in one batch, where either rank
    takes the other's first message for its own first question. So the shapes go the way of the tensors.
    """
    original = P2PCommunicator._communicate_shapes
    if getattr(original, "is_patched", False):
        return

    def exchange(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        if self.virtual_pipeline_model_parallel_size is None:
            return original(self, send_next, send_prev, recv_prev, recv_next)

        def shape(tensor: Any) -> Any:
            return None if tensor is None else torch.tensor(tensor.shape, device=torch.cuda.current_device())

        def room(is_asked: bool) -> Any:
            return torch.zeros(3, dtype=torch.int64, device=torch.cuda.current_device()) if is_asked else None

        found_prev, found_next = room(recv_prev), room(recv_next)
        requests = p2p_communication._p2p_ops(
            tensor_send_next=shape(send_next),
            tensor_send_prev=shape(send_prev),
            tensor_recv_prev=found_prev,
            tensor_recv_next=found_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return found_prev.tolist() if recv_prev else None, found_next.tolist() if recv_next else None

    exchange.is_patched = True  # type: ignore[attr-defined]
    P2PCommunicator._communicate_shapes = exchange
