"""Requests to the engine and its responses, as plain records.

Every sample is a request of its own. Its seed is a pure function of base seed, step, prompt and sample number, so a
response does not depend on the replica or on the rest of the batch, except for the rounding of matrix products: kernels
may sum in another order for another batch size, and a draw that is that close to the border between two tokens may
fall on the other side.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.batch import Prompt
from megarl.rollout.config import RolloutSection, SamplingSection

Sampling = RolloutSection | SamplingSection  # both define how tokens are drawn
GREEDY = SamplingSection(do_sample=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample of one prompt."""

    prompt: int  # its position among the given prompts
    token_ids: list[int]  # the stop token included
    log_probs: list[float] | None  # of each token, under the distribution it was drawn from; None = not requested
    truncated: bool  # reached the length limit before a stop token
    num_cached: int = 0  # tokens of the prompt whose keys were cached
    weight_version: int = 0  # finished steps when a sync brought the weights


def request_seed(seed: int, *, step: int, prompt_index: int, sample: int) -> int:
    """Return the seed of a request, in [0, 2^63). Equal arguments give equal seeds on every machine."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt_index, sample), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def stop_token_ids(model_dir: Path, tokenizer_eos: int | None) -> list[int]:
    """Return every token that ends a response: of generation_config.json, else config.json, and of the tokenizer."""
    ids = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        declared = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if declared is not None:
            ids.update([declared] if isinstance(declared, int) else declared)
            break
    return sorted(ids)


def request_params(sampling: Sampling, *, seed: int, max_tokens: int, stop: Sequence[int], log_probs: bool) -> Any:
    """Return vLLM's parameters of one sample. An empty `stop` generates to the full length."""
    from vllm import SamplingParams

    drawn: dict[str, Any] = {"temperature": 0.0}
    if sampling.do_sample and sampling.temperature > 0.0:
        drawn = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),  # both -1 and 0 mean all tokens; every vLLM knows 0
            "seed": seed,
        }
    return SamplingParams(
        **drawn,
        max_tokens=max_tokens,
        stop_token_ids=list(stop),
        ignore_eos=True,  # the engine has no tokenizer: every token that ends a response is in `stop`
        detokenize=False,
        logprobs=0 if log_probs else None,
        flat_logprobs=True,
    )


def read_output(output: Any, *, position: int, prompt: Prompt, weight_version: int) -> Generation:
    """Return the sample in a vLLM RequestOutput.

    Raises:
        RuntimeError: the sample is missing, empty, aborted or not a number, or it belongs to another prompt.
    """
    where = f"for prompt {prompt.index}"
    if list(output.prompt_token_ids) != list(prompt.token_ids):
        raise RuntimeError(f"The engine returned the response to another prompt {where}")
    if not output.finished or len(output.outputs) != 1:
        raise RuntimeError(f"The engine returned {len(output.outputs)} finished samples of 1 {where}")
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length") or not sample.token_ids:
        raise RuntimeError(f"The engine gave up {where} after {len(sample.token_ids)} tokens: {sample.finish_reason}")
    log_probs = None
    if sample.logprobs is not None:
        log_probs = list(sample.logprobs.logprobs)
        if len(log_probs) != len(sample.token_ids) or any(value != value for value in log_probs):
            raise RuntimeError(f"The engine's log-probabilities {where} are missing or NaN: its weights are broken")
    truncated = sample.finish_reason == "length"
    num_cached = output.num_cached_tokens or 0
    return Generation(position, list(sample.token_ids), log_probs, truncated, num_cached, weight_version)
