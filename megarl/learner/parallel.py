"""The Megatron mesh: who shares a layer (tensor), who has the next ones (pipeline), who has other samples (data)."""

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state, tensor_parallel

from megarl.learner.config import MegatronSection
from megarl.learner.patches import apply_patches
from megarl.platform.cpu import megatron_platform


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates, and the groups it talks in."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_group: Any

    @property
    def is_last_stage(self) -> bool:
        """True where the hidden states come out."""
        return self.pp_rank == self.pp_size - 1

    @property
    def speaks_for_its_samples(self) -> bool:
        """True on exactly one of the ranks that hold the same samples: first tensor rank of the last stage."""
        return self.is_last_stage and self.tp_rank == 0


def build_mesh(section: MegatronSection) -> Mesh:
    """Create Megatron's process groups, once per process. torch.distributed must be initialised."""
    apply_patches()
    with megatron_platform():
        parallel_state.initialize_model_parallel(
            section.tensor_model_parallel_size,
            section.pipeline_model_parallel_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(section.seed)
    return Mesh(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
