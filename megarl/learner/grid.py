"""The grid of ranks that a `megatron` section describes. Plans need the grid without importing Megatron."""

from megarl.learner.config import MegatronSection
from megarl.models.grid import Grid


def grid_of(section: MegatronSection, num_ranks: int) -> Grid:
    """Return the grid of `num_ranks` ranks that the section describes."""
    override = section.override_transformer_config
    return Grid(
        num_ranks=num_ranks,
        tp=section.tensor_model_parallel_size,
        pp=section.pipeline_model_parallel_size,
        cp=section.context_parallel_size,
        ep=section.expert_model_parallel_size,
        etp=section.expert_tensor_parallel_size or section.tensor_model_parallel_size,
        vpp=section.virtual_pipeline_model_parallel_size or 1,
        num_layers_in_first_stage=override.get("num_layers_in_first_pipeline_stage"),
        num_layers_in_last_stage=override.get("num_layers_in_last_pipeline_stage"),
    )
