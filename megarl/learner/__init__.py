"""The trainer: Megatron-Core models that infer and update under any split. No other package imports Megatron."""

from megarl.learner.fused import hide_on_cpu
from megarl.platform.hiding import hide

# Megatron-Core reports the metrics of its own inference engine to W&B. The import takes seconds in every process.
hide("wandb", library="megatron")  # D145
hide_on_cpu()
