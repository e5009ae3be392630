"""Reinforcement-learning post-training of language models: Megatron-Core learners and vLLM rollouts in one process.

Imports run one way: commands > assembly > training, planning > samples, weight_sync, report > checkpoint, config >
learner, rollout > models > environments > reshard, data, tracking > rewards > sandbox > algorithms, distributed >
platform > batch, section.
"""

__version__ = "0.1.0"
