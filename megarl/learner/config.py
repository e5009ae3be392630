"""What a user may say about how Megatron-Core divides and optimises a model."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megarl.section import Count, CountFromZero, Fraction, Interval, Seed, Weight, section

DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


def _none_if_negative(value: object) -> object:
    return None if value == -1 else value


@section
class MegatronSection:
    """`*.megatron.*`: how one model is cut over the ranks and where its parts live."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: Count = 1
    """Stages that the layers are divided into."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Chunks of layers that each stage holds in turns, which shortens the pipeline's bubble; null = one."""
    context_parallel_size: Count = 1
    """Ranks that share the tokens of every sequence."""
    expert_model_parallel_size: Count = 1
    """Ranks that the experts of a layer are divided among; cut out of the data-parallel and context-parallel ranks."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that share every expert; null = tensor_model_parallel_size."""
    sequence_parallel: bool = True
    """Split the activations between tensor-parallel layers too; acts where tensor_model_parallel_size > 1."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    param_offload: bool = False
    """Keep the parameters in host memory between phases; of a model that learns, with use_distributed_optimizer."""
    grad_offload: bool = False
    """Release the gradient buffers between phases."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory between phases."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of parameters and activations; the optimizer always keeps float32."""
    seed: Seed = 1
    """Seed of new parameters (the critic's head) and of dropout."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig: recompute_granularity, attention_backend, ..."""


@section
class OptimSection:
    """`*.optim.*`: AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0.0, le=10.0)] = 1e-6
    """Peak learning rate, at most 10."""
    lr_warmup_steps: Annotated[CountFromZero | None, BeforeValidator(_none_if_negative)] = None
    """Iterations of linear warm-up; null or -1 = lr_warmup_steps_ratio of all iterations."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Share of all iterations spent in warm-up."""
    min_lr_ratio: Fraction | None = None
    """Last learning rate as a share of the peak, for cosine and linear; null = 0."""
    warmup_style: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up: a constant rate, or a cosine or linear decay."""
    total_training_steps: Interval = -1
    """Length of the schedule in iterations; -1 or 0 = filled in from the data and the epochs."""
    weight_decay: Weight = 0.01
    """Decoupled weight decay; norms and biases have none."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Adam's decay rates, less than 1."""
