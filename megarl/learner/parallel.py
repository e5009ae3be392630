"""The Megatron mesh: the coordinates of this rank in every kind of parallelism, and its process groups.

The ranks that hold the same layers form a block; inside a block the tensor coordinate runs fastest, then context, then
data. Expert layers split the same block in another way: expert tensor runs fastest, then expert; the rest are replicas.
"""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl.distributed.exchange import world_timeout
from megarl.distributed.sharded import Need, Shares
from megarl.learner.config import MegatronSection
from megarl.learner.grid import grid_of
from megarl.learner.patches import apply_patches
from megarl.learner.patches.cpu import megatron_platform
from megarl.models.grid import Cut, Grid


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's coordinates, and the groups that it communicates in."""

    grid: Grid  # of all ranks
    cut: Cut  # this rank's part of a layer's matrices
    pp_rank: int
    cp_rank: int
    shares: Shares  # of a batch, one for each data-parallel rank
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup

    @property
    def tp_size(self) -> int:
        """The number of ranks that share every layer."""
        return self.grid.tp

    @property
    def tp_rank(self) -> int:
        """This rank's number among the ranks that share every layer."""
        return self.cut.tp_rank

    @property
    def pp_size(self) -> int:
        """The number of pipeline stages."""
        return self.grid.pp

    @property
    def vpp_size(self) -> int:
        """The number of chunks of layers in each stage."""
        return self.grid.vpp

    @property
    def cp_size(self) -> int:
        """The number of ranks that share the tokens of a sequence."""
        return self.grid.cp

    @property
    def dp_size(self) -> int:
        """The number of groups of ranks that have samples of their own."""
        return self.grid.dp

    @property
    def stage_shares(self) -> Shares:
        """The same shares, for stages that take only the tokens that their layers read."""
        last = self.pp_size - 1  # D424
        needs = {0: Need.READ, last: Need.ALL}
        stages = map(self.grid.stage, range(self.grid.num_ranks))
        return replace(self.shares, needs=tuple(needs.get(stage, Need.NONE) for stage in stages))

    @property
    def is_last_stage(self) -> bool:
        """True on the stage that computes the final hidden states."""
        return self.pp_rank == self.pp_size - 1


def build_mesh(section: MegatronSection) -> Mesh:
    """Create Megatron's process groups, once per process. Requires torch.distributed."""
    apply_patches()
    grid = grid_of(section, dist.get_world_size())
    with megatron_platform():
        parallel_state.initialize_model_parallel(
            grid.tp,
            grid.pp,
            section.virtual_pipeline_model_parallel_size,
            context_parallel_size=grid.cp,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.etp,
            distributed_timeout_minutes=world_timeout() / timedelta(minutes=1),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(section.seed)
    cut = grid.cut(dist.get_rank())
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    cp_rank = parallel_state.get_context_parallel_rank()
    has_outputs = pp_rank == grid.pp - 1 and cut.tp_rank == 0 and cp_rank == 0
    return Mesh(
        grid=grid,
        cut=cut,
        pp_rank=pp_rank,
        cp_rank=cp_rank,
        shares=Shares.of(parallel_state.get_data_parallel_rank(), reports=has_outputs),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
    )
