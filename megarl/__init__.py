"""Reinforcement-learning post-training of language models: Megatron-Core learners, vLLM rollouts, one process."""

__version__ = "0.1.0"
