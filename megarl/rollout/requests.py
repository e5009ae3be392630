"""Requests to a replica: the samples to draw, and their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megarl.batch import Generation, Prompt
from megarl.platform.errors import UserError
from megarl.rollout.sampling import Sampling, request_seed

if TYPE_CHECKING:
    from vllm import SamplingParams

MOST_NAMED = 8  # rows of the data set


@dataclass(frozen=True, slots=True)
class Request:
    """A sample to draw, or to continue."""

    prompt: Prompt
    step: int  # finished steps when it began
    started: Generation  # its number, and its tokens from earlier steps

    def token_ids(self) -> list[int]:
        """Return the prompt of the request: tokens from earlier steps are part of it, so their keys are new."""
        return [*self.prompt.token_ids, *self.started.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Parameters that the requests for all samples share: sampling, lengths, seed, stop tokens."""

    sampling: Sampling
    max_tokens: int  # of a response
    max_model_len: int  # of prompt and response together
    seed: int
    stop: Sequence[int]  # tokens that end a response; without any it has the full length
    log_probs: bool
    final_only: bool = True  # False: the tokens so far come after every step, so a sample that is stopped keeps them

    def of(self, request: Request) -> "SamplingParams":
        """Return vLLM's parameters of a request. Raises UserError if the prompt is too long."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt = request.prompt
        if len(prompt.token_ids) + self.max_tokens > self.max_model_len:
            raise UserError(
                f"Prompt {prompt.index} has {len(prompt.token_ids)} tokens and its response may have "
                f"{self.max_tokens}, but the engine was started for {self.max_model_len} together; raise "
                "data.max_prompt_length"
            )
        sampling = self.sampling
        num_begun = len(request.started.token_ids)
        params: dict[str, object] = {"temperature": 0.0}
        if sampling.do_sample and sampling.temperature > 0.0:
            sample = request.started.sample
            params = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(sampling.top_k, 0),  # both -1 and 0 mean all tokens; every vLLM knows 0
                "seed": request_seed(
                    self.seed, step=request.step, prompt_index=prompt.index, sample=sample, num_begun=num_begun
                ),
            }
        return SamplingParams(
            **params,
            max_tokens=self.max_tokens - num_begun,
            stop_token_ids=list(self.stop),
            ignore_eos=True,  # the engine has no tokenizer: every token that ends a response is in `stop`
            detokenize=False,
            logprobs=0 if self.log_probs else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY if self.final_only else RequestOutputKind.CUMULATIVE,
        )


def failure(error: Exception, name: str, rows: Sequence[int], *, step: int) -> str:
    """Describe a failed generation: the engine, the step, the rows of the data set, the error and a remedy."""
    named = ", ".join(map(str, rows[:MOST_NAMED])) + (" ..." if len(rows) > MOST_NAMED else "")
    remedy = (
        " Lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or max_num_batched_tokens."
        if isinstance(error, torch.OutOfMemoryError)
        else ""
    )
    return (
        f"{name} failed after {step} finished steps, asked for responses to rows {named}: "
        f"{type(error).__name__}: {error}. Nothing that it generated is used.{remedy}"
    )
