"""Log-probabilities of drawn tokens without the ranks that vLLM counts."""

import torch

from megarl.rollout import patches
from megarl.rollout.patches.ranks import GATHER, skip_ranks


def test_drawn_log_probs_equal_those_of_vllm() -> None:
    patches.prepare_environment()
    from vllm.v1.sample.sampler import Sampler

    skip_ranks()
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(5, 300, generator=generator).log_softmax(-1)
    tokens = torch.randint(0, 300, (5,), generator=generator)
    for num_alternatives in (0, 2):
        with torch.compiler.set_stance("force_eager"):  # vLLM compiles the count of ranks
            expected = GATHER.original("gather_logprobs")(log_probs, num_alternatives, tokens)
            found = Sampler.gather_logprobs(log_probs, num_alternatives, token_ids=tokens)
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        ranks = expected[2] if num_alternatives else torch.zeros(5)
        assert found[2].tolist() == ranks.tolist()
