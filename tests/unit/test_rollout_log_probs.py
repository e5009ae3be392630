"""Log-probabilities of drawn tokens in arrays."""

from typing import Any

import numpy as np
import pytest

from megarl.rollout import patches
from megarl.rollout.patches.log_probs import UPDATE, keep_log_probs_in_arrays

NUM_TOKENS = (1, 1, 3)
"""The tokens of each update."""


@pytest.mark.parametrize("num_alternatives", [0, 2])
def test_arrays_have_the_numbers_of_vllm(num_alternatives: int) -> None:
    patches.prepare_environment()
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    keep_log_probs_in_arrays()
    mine, theirs = (
        LogprobsProcessor(None, FlatLogprobs(), None, 0.0, num_alternatives, num_prompt_logprobs=None) for _ in range(2)
    )
    generator = np.random.default_rng(1)
    for number in NUM_TOKENS:
        shape = (number, 1 + num_alternatives)
        log_probs = -generator.random(shape, dtype=np.float32)
        found: Any = LogprobsLists(generator.integers(0, 300, shape), log_probs, np.zeros(number, dtype=np.int64), None)
        mine._update_sample_logprobs(found)
        UPDATE.original("_update_sample_logprobs")(theirs, found)
    assert mine.logprobs is not None and theirs.logprobs is not None
    assert [*mine.logprobs.token_ids] == theirs.logprobs.token_ids
    assert [*mine.logprobs.logprobs] == theirs.logprobs.logprobs
    ours, others = (
        [[(token, each.logprob) for token, each in position.items()] for position in found.logprobs]
        for found in (mine, theirs)
    )
    assert ours == others
    assert isinstance(mine.logprobs, patches.DrawnTokens) == (num_alternatives == 0)
    assert len(mine.logprobs) == sum(NUM_TOKENS)
