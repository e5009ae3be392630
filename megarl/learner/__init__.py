"""The trainer: Megatron-Core models that infer and update under any split. No other room imports Megatron."""
