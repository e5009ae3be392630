"""Settings of how Megatron-Core splits and optimises a model."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megarl.mark import OFF_CPU, OPTIMIZER, SPLIT, Change, Effect, key, when
from megarl.section import Count, CountFromZero, Fraction, Interval, Seed, Weight, section

OFFLOAD = Change(Effect.NONE, "the place where parts of the trainer are kept")
LENGTH = when(
    ".follows_length",
    words="the learning rate decays, or warms up by `lr_warmup_steps_ratio`",
    because=(".warmup_style", ".lr_warmup_steps_ratio"),
)
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


def _none_if_negative(value: object) -> object:
    return None if value == -1 else value


@section(Change(Effect.CURVE, "how the model computes"))
class MegatronSection:
    """`*.megatron.*`: the split of one model over the ranks, and the place of its parts between phases."""

    tensor_model_parallel_size: Count = key(1, SPLIT)
    """Ranks that share every layer (TP)."""
    pipeline_model_parallel_size: Count = key(1, SPLIT)
    """Pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2, le=1_000_000)] | None = key(None, SPLIT)
    """Chunks of layers in each stage (VPP); null = 1."""
    context_parallel_size: Count = key(1, SPLIT)
    """Ranks that share the tokens of every sequence (CP)."""
    expert_model_parallel_size: Count = key(1, SPLIT)
    """Ranks that divide the experts of a layer (EP), out of the DP and CP ranks."""
    expert_tensor_parallel_size: Count | None = key(None, SPLIT)
    """Ranks that share every expert (ETP); null = tensor_model_parallel_size."""
    sequence_parallel: bool = key(True, SPLIT)
    """Split the activations between tensor-parallel layers too."""
    use_distributed_optimizer: bool = key(True, SPLIT)
    """Shard the optimizer state over the data-parallel ranks."""
    param_offload: bool = key(False, OFFLOAD, read_if=OFF_CPU)
    """Keep the parameters in host memory between phases; needs use_distributed_optimizer if the model learns."""
    grad_offload: bool = key(False, OFFLOAD, read_if=OFF_CPU)
    """Free the gradients between phases."""
    optimizer_offload: bool = key(False, OFFLOAD, read_if=OFF_CPU)
    """Keep the optimizer state in host memory between phases."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of parameters and activations; the optimizer works in float32."""
    seed: Seed = 1
    """Seed of new parameters and of dropout."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig."""

    @property
    def has_dropout(self) -> bool:
        """Whether updates leave out numbers of the layers; dropout of adapters is not counted."""
        return any(self.override_transformer_config.get(name) for name in ("hidden_dropout", "attention_dropout"))


@section(OPTIMIZER)
class OptimSection:
    """`*.optim.*`: AdamW and the schedule of its learning rate."""

    lr: Annotated[float, Field(gt=0.0, le=10.0)] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[CountFromZero | None, BeforeValidator(_none_if_negative)] = None
    """Updates of linear warm-up; null or -1 = by lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = key(0.0, read_if=when(".lr_warmup_steps", None))
    """Linear warm-up as a share of the schedule's length."""
    min_lr_ratio: Fraction | None = key(None, read_if=when(".warmup_style", "cosine", "linear"))
    """Last learning rate as a share of the peak; null = 0 one update after the last."""
    warmup_style: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up."""
    total_training_steps: Interval = key(-1, read_if=LENGTH)
    """Length of the schedule, in steps; -1 or 0 = the run's."""
    weight_decay: Weight = 0.01
    """Decoupled weight decay, of all except norms and biases."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Adam's decay rates, each less than 1."""

    @property
    def decays(self) -> bool:
        """Whether the learning rate falls after the warm-up."""
        return self.warmup_style != "constant"

    @property
    def follows_length(self) -> bool:
        """Whether a learning rate depends on the length of the schedule."""
        return self.decays or (self.lr_warmup_steps is None and self.lr_warmup_steps_ratio > 0.0)

    def length(self, num_updates: int) -> int:
        """Return the length of the schedule of a model that takes `num_updates` updates in the run."""
        return self.total_training_steps if self.total_training_steps > 0 else num_updates

    def num_warm_up(self, num_updates: int) -> int:
        """Return the updates of the warm-up; the last of them has the peak rate."""
        if self.lr_warmup_steps is not None:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * self.length(num_updates))

    def last_decay(self, num_updates: int) -> int:
        """Return the update, counted from 1, that has the final rate."""
        return self.length(num_updates) + (self.min_lr_ratio is None)
