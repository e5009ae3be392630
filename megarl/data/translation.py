"""Samples in the tokens of another model: a critic with its own vocabulary reads the text that the policy wrote.

Before each token of the policy, the critic values the text so far. It reads that text in complete tokens of its own;
the last of them ends no later than the text before the policy's token, so no value depends on the token that it
judges.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from megarl.batch import Rollouts
from megarl.columns import end_to_end
from megarl.data.messages import encode_prompt
from megarl.data.tokenizer import Tokenizer
from megarl.platform.errors import placed

R = TypeVar("R", bound=Rollouts)


class Translation:
    """Translates samples from the tokens of the policy (`writer`) to those of another model (`reader`).

    A step translates the same samples twice, to value them and to learn from them; the last translation is kept.
    """

    def __init__(self, *, writer: Tokenizer, reader: Tokenizer) -> None:
        self.writer = writer
        self.reader = reader
        self._reader_of_responses = reader.of_observations()
        self._last: Rollouts | None = None

    def __call__(self, batch: R) -> R:
        """Return the batch with the reader's `sequences` and `places`.

        Raises:
            UserError: the reader's chat template refuses a prompt, or the prompt has no text; names the data row.
        """
        if self._last is None or not _have_same_samples(self._last, batch):
            self._last = self._translated(batch)
        last = self._last
        return replace(batch, read_lengths=last.read_lengths, sequences=last.sequences, places=last.places, routes=None)

    def _translated(self, batch: R) -> R:
        read = [self._read(batch, row) for row in range(len(batch))]
        places = torch.tensor([place for _, of_row in read for place in of_row], dtype=torch.int64)
        sequences, lengths = end_to_end([sequence for sequence, _ in read])
        return replace(batch, read_lengths=lengths, sequences=sequences, places=places, routes=None)

    def _read(self, batch: Rollouts, sample: int) -> tuple[list[int], list[int]]:
        """Return the reader's tokens of a sample, and the place of the last one before each token of the response."""
        prompt = batch.prompt_of(sample)
        response = batch.response_ids(sample).tolist()
        before = [] if self.writer.templates(prompt.raw_prompt) else list(prompt.token_ids)
        with placed(f"the critic cannot read data row {prompt.index}: "):
            read_prompt = encode_prompt(prompt.raw_prompt, self.reader)
        read_response = self._reader_of_responses.encode(
            self.writer.decode_after(before, response), add_special_tokens=False
        )
        starts = self.writer.reach(response, before=before, half=0)[:-1]
        reach = self.reader.reach(read_response, half=1)
        places = [len(read_prompt) - 2 + bisect_right(reach, start) for start in starts]
        return [*read_prompt, *read_response, self.reader.eos_token_id], places


def _have_same_samples(one: Rollouts, other: Rollouts) -> bool:
    return (
        torch.equal(one.responses, other.responses)
        and torch.equal(one.num_tokens, other.num_tokens)
        and torch.equal(one.groups, other.groups)
        and _read_prompts(one) == _read_prompts(other)
    )


def _read_prompts(batch: Rollouts) -> list[tuple[int, Sequence[int]]]:
    return [(prompt.index, prompt.token_ids) for prompt in batch.prompts]
