"""Collectives with unequal parts, which gloo lacks, and collectives of one rank, which cost more than their copy."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace

UNEQUAL_PARTS = declare_megatron(
    "megatron.core.tensor_parallel.mappings",
    "_gather_along_first_dim",
    "_reduce_scatter_along_first_dim",
    reason="ranks that share experts gather unequal numbers of tokens; gloo requires equal ones",
    upstream="https://github.com/pytorch/pytorch/issues/156627",
    until="gloo gathers and reduces unequal parts",
)

BUCKETS = declare_megatron(
    "megatron.core.distributed.param_and_grad_buffer",
    "dist_reduce_scatter_func",
    "dist_all_gather_func",
    reason="one data-parallel rank sends itself all gradients and weights; gloo copies them with OpenMP threads of its "
    "own, and libgomp, which then counts more threads than cores, lets none of them wait actively",
    upstream="megatron/core/distributed/param_and_grad_buffer.py: _ParamAndGradBucketGroup",
    until="a group of one rank has no collectives",
)


def exchange_unequal_parts() -> None:
    """Gather unequal parts by an all-to-all, and reduce them by an all-reduce."""
    gather = UNEQUAL_PARTS.original("_gather_along_first_dim")
    reduce_scatter = UNEQUAL_PARTS.original("_reduce_scatter_along_first_dim")

    def gather_parts(
        part: Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if output_split_sizes is None:
            return gather(part, group, None, use_global_buffer)
        size = group.size()
        gathered = part.new_empty(sum(output_split_sizes), *part.shape[1:])
        dist.all_to_all_single(gathered, torch.cat([part] * size), output_split_sizes, [len(part)] * size, group=group)
        return gathered

    def sum_parts(
        parts: Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if input_split_sizes is None:
            return reduce_scatter(parts, group, None, use_global_buffer)
        total = parts.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    replace(UNEQUAL_PARTS, _gather_along_first_dim=gather_parts, _reduce_scatter_along_first_dim=sum_parts)


def keep_buckets_of_one_rank() -> None:
    """Leave the gradients and weights of a single data-parallel rank where they are: its shard is the whole bucket."""

    def unless_alone(collective: Callable[..., object]) -> Callable[..., object]:
        def run(output: Tensor, given: Tensor, *, group: dist.ProcessGroup, **options: object) -> object:
            if group.size() == 1 and output.data_ptr() == given.data_ptr():
                return None
            return collective(output, given, group=group, **options)

        return run

    replace(BUCKETS, **{name: unless_alone(BUCKETS.original(name)) for name in BUCKETS.names})
