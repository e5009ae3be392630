"""The log-probabilities of the tokens that an engine draws in one of its steps: vLLM's way, and what replaces it."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.rollout import patches
from megarl.rollout.patches.log_probs import UPDATE, keep_log_probs_in_arrays
from megarl.rollout.patches.ranks import GATHER, skip_ranks

VOCABULARY = 151_936
WARM_UP, STEPS = 2, 20


def measure(num_requests: int) -> dict[str, Any]:
    """Return the processor time of a step, after the softmax, until requests have their tokens' log-probabilities."""
    patches.prepare_environment()
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.sampler import Sampler

    skip_ranks()
    keep_log_probs_in_arrays()
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(num_requests, VOCABULARY, generator=generator).log_softmax(-1)
    theirs = (GATHER.original("gather_logprobs"), UPDATE.original("_update_sample_logprobs"))
    mine = (Sampler.gather_logprobs, LogprobsProcessor._update_sample_logprobs)
    with patches.compilation(allowed=False):  # as in an eager engine
        return {
            "num_requests": num_requests,
            "vocabulary": VOCABULARY,
            "cpu_us": _microseconds(*mine, log_probs),
            "vllm_cpu_us": _microseconds(*theirs, log_probs),
        }


def _microseconds(gather: Callable[..., Any], update: Callable[..., None], log_probs: Tensor) -> float:
    """Return the processor time of the fastest step of an engine."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    processors = [
        LogprobsProcessor(None, FlatLogprobs(), None, 0.0, num_logprobs=0, num_prompt_logprobs=None)
        for _ in range(len(log_probs))
    ]
    seconds = []
    for number in range(WARM_UP + STEPS):
        token_ids = torch.arange(len(log_probs)) + number
        start = time.process_time()
        found = gather(log_probs, 0, token_ids=token_ids).tolists()
        for place, processor in enumerate(processors):
            update(processor, found.slice_request(place, 1))
        seconds.append(time.process_time() - start)
    return min(seconds[WARM_UP:]) * 1e6
