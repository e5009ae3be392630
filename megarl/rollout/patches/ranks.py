"""The rank of a drawn token among all tokens, which vLLM's first model runner counts and nothing here reads."""

from typing import Any

import torch

from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

GATHER = declare_vllm(
    "vllm.v1.sample.sampler:Sampler",
    "gather_logprobs",
    reason="a rank costs a comparison with each token of the vocabulary, more than the softmax",
    upstream="vllm/v1/sample/sampler.py: Sampler.gather_logprobs",
    until="a request without alternatives (logprobs=0) has no rank",
)


def skip_ranks() -> None:
    """Return rank 0 for each token if only log-probabilities of drawn tokens are asked for."""
    from vllm.v1.outputs import LogprobsTensors

    def gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs:
            return GATHER.original("gather_logprobs")(logprobs, num_logprobs, token_ids)
        tokens = token_ids[:, None]
        return LogprobsTensors(tokens.to(torch.int32), logprobs.gather(-1, tokens), torch.zeros_like(token_ids))

    replace(GATHER, gather_logprobs=staticmethod(gather))
