"""Requests to a replica: the samples to draw, and their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import Generation, Prompt
from megarl.platform.errors import UserError
from megarl.rollout.sampling import Sampling, request_params, request_seed

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
    stop: Sequence[int]  # tokens that end a response
    log_probs: bool
    final_only: bool = True  # False: a sample that is stopped keeps its tokens

    def of(self, request: Request) -> Any:
        """Return vLLM's `SamplingParams` of a request. Raises UserError if the prompt is too long."""
        prompt = request.prompt
        if len(prompt.token_ids) + self.max_tokens > self.max_model_len:
            raise UserError(
                f"Prompt {prompt.index} has {len(prompt.token_ids)} tokens and its response may have "
                f"{self.max_tokens}, but the engine was started for {self.max_model_len} together; raise "
                "data.max_prompt_length"
            )
        num_begun = len(request.started.token_ids)
        sample = request.started.sample
        return request_params(
            self.sampling,
            seed=request_seed(
                self.seed, step=request.step, prompt_index=prompt.index, sample=sample, num_begun=num_begun
            ),
            max_tokens=self.max_tokens - num_begun,
            stop=self.stop,
            log_probs=self.log_probs,
            final_only=self.final_only,
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
