"""The libraries that the ranks of a `RankPool` need, imported once: ranks are forked from a process that has them."""

import torch

from megarl.rollout import patches

torch.set_num_threads(1)  # a thread would not survive the fork
patches.prepare_environment()

import megatron.core.models.gpt  # noqa: E402, F401
import transformers  # noqa: E402, F401
import vllm  # noqa: E402, F401 - it reads the environment as it is imported
