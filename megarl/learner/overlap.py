"""Sums of gradients and gathers of weights that run on CUDA while the model computes.

The parameters lie in buckets. A bucket's gradients travel as soon as the backward pass of the last micro-batch has
computed them all. After an optimizer step the buckets' weights travel in the order in which the next forward pass
needs them, and each layer waits for its own.

Invariant: outside of `weights_in_flight` all weights are complete on all ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from megarl.platform.device import on_cuda


def reduction(*, use_distributed_optimizer: bool) -> DistributedDataParallelConfig:
    """Return how gradients are summed over ranks with other tokens."""
    overlaps = on_cuda() and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps and use_distributed_optimizer,
        align_param_gather=True,  # `gather_weights` begins the gathers, and no layer those of the next
    )


def sum_gradients_at_the_end(models: Sequence[DistributedDataParallel]) -> None:
    """Let Megatron's schedules sum the gradients with the last micro-batch only; they ask the first chunk."""
    if models[0].ddp_config.overlap_grad_reduce:
        waiting = [model.no_sync for model in models]
        models[0].config.no_sync_func = waiting if len(models) > 1 else waiting[0]
        for model in models:
            for parameter in model.parameters():
                parameter.is_awaited = True


def is_awaited(parameter: Tensor) -> bool:
    """Return True if Megatron sums a parameter's gradient as soon as autograd has one, and asserts that it has."""
    return getattr(parameter, "is_awaited", False)


def gather_weights(models: Sequence[DistributedDataParallel]) -> None:
    """Begin to gather the weights that an optimizer step has changed, if it has not gathered them itself."""
    for group in _groups_in_flight_order(models):
        group.start_param_sync()


@contextmanager
def weights_in_flight(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Allow gathers to be on their way within the block, and wait for them at its end."""
    try:
        yield
    finally:
        for group in _groups_in_flight_order(models):
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def _groups_in_flight_order(models: Sequence[DistributedDataParallel]) -> Iterator[_ParamAndGradBucketGroup]:
    """Yield the groups of buckets whose gathers overlap, first those of the first layers: buckets lie the other way."""
    for model in models:
        if model.ddp_config.overlap_param_gather:
            yield from (*reversed(model.bucket_groups), *reversed(model.expert_parallel_bucket_groups))
