"""Reinforcement-learning post-training of language models: Megatron-Core learners and vLLM rollouts in one process.

A file in this folder is a command, except `entry`, `batch` and `section`. Every folder is a room. Imports run one way:
commands > assembly, cli > training, planning > sync > checkpoint, config > learner, rollout > models > reshard, data,
tracking > rewards > algorithms, distributed > platform > batch, section.
"""

__version__ = "0.1.0"
