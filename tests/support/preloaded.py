"""Imports that the ranks of tests need. A process makes them once, and the ranks are forked from it."""

import torch

from megarl.rollout import patches

torch.set_num_threads(1)  # a thread would not survive the fork
patches.prepare_environment()

# vLLM reads the environment as it is imported.
import transformers  # noqa: E402, F401
import vllm.entrypoints.llm  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import megarl.assembly.run  # noqa: E402
import megarl.rollout.destination  # noqa: E402
import megarl.rollout.reload  # noqa: E402, F401
