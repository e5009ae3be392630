"""Requests to the engine and its responses, as plain records.

Every sample is a request of its own. Its seed is a pure function of base seed, step, prompt and sample number, and the
number that draws a token is a function of this seed and of the token's position (`patches/draws.py`). So a response
does not depend on the replica or on the rest of the batch, except for the rounding of matrix products: kernels
may sum in another order for another batch size, and a draw that is that close to the border between two tokens may
fall on the other side.

A sample that several steps draw is one request in each of them. Their seeds differ in the number of tokens that the
request follows, and all have the step in which the sample began: with the seed of the first request, the draws of the
others would repeat those of its first tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.batch import Generation, float32, int32
from megarl.platform.seeds import seed_of
from megarl.rollout.config import RolloutSection, SamplingSection

if TYPE_CHECKING:
    from vllm import RequestOutput

Sampling = RolloutSection | SamplingSection  # both define how tokens are drawn
GREEDY = SamplingSection(do_sample=False)


def request_seed(seed: int, *, step: int, prompt_index: int, sample: int, num_begun: int = 0) -> int:
    """Return the seed of a request, in [0, 2^63). Equal arguments give equal seeds on every machine.

    `num_begun` is the number of the response's tokens that earlier steps drew.
    """
    return seed_of(seed, step, prompt_index, sample, *((num_begun,) if num_begun else ()))


def read_output(output: "RequestOutput | None", *, given: Sequence[int], where: str, weight_version: int) -> Generation:
    """Return the sample in a vLLM RequestOutput, without its place. `output` None: the request has no token yet.

    `given` are the tokens of the request, and `where` names its prompt in messages.

    Raises:
        RuntimeError: the sample is missing, empty, aborted or not a number, or it belongs to another prompt.
    """
    if output is None:
        return Generation(prompt=0, token_ids=int32(), log_probs=float32(), truncated=False, complete=False)
    if list(output.prompt_token_ids) != list(given):
        raise RuntimeError(f"The engine returned the response to another prompt {where}")
    if len(output.outputs) != 1:
        raise RuntimeError(f"The engine returned {len(output.outputs)} samples of 1 {where}")
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length", None) or output.finished and not sample.token_ids:
        raise RuntimeError(f"The engine gave up {where} after {len(sample.token_ids)} tokens: {sample.finish_reason}")
    token_ids: Sequence[int] = sample.token_ids
    log_probs = None
    if sample.logprobs is not None:
        token_ids, log_probs = sample.logprobs.token_ids, float32(sample.logprobs.logprobs)
        if not len(token_ids) == len(log_probs) == len(sample.token_ids) or np.isnan(log_probs).any():
            raise RuntimeError(f"The engine's log-probabilities {where} are missing or NaN: its weights are broken")
    return Generation(
        prompt=0,
        token_ids=int32(token_ids),
        log_probs=log_probs,
        truncated=sample.finish_reason == "length",
        num_cached=output.num_cached_tokens or 0,
        weight_versions=int32([weight_version]) * len(token_ids),
        complete=output.finished,
    )
