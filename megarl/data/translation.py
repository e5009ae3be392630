"""Samples in the tokens of another model: a critic with a vocabulary of its own reads the text that the policy wrote.

What a critic values before a token of the policy is the text so far. It reads that text in whole tokens of its own: the
last one that counts reaches no further than the text before the policy's token, so no value knows what it is to judge.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import torch

from megarl.batch import Rollouts
from megarl.data.messages import encode_prompt
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import in_shares

R = TypeVar("R", bound=Rollouts)


@dataclass(kw_only=True)
class Translation:
    """From the tokens of the policy to those of a model that reads along.

    An iteration asks twice for the same responses, to value them and to learn from them: they are read once.
    """

    writer: Tokenizer
    reader: Tokenizer
    _last: Rollouts | None = field(default=None, init=False)

    def __call__(self, batch: R) -> R:
        """The batch as the reader sees it: with `sequences` and `places`. Collective; ranks share the work.

        Raises:
            ValueError: the reader's chat template refuses a prompt, or there is no text of it; names the data row.
        """
        last = self._last
        if last is None or last.responses is not batch.responses or last.prompts is not batch.prompts:
            last = self._last = self._translated(batch)
        return replace(batch, sequences=last.sequences, places=last.places)

    def _translated(self, batch: R) -> R:
        read = [*chain.from_iterable(in_shares(len(batch), lambda share: [self._read(batch, row) for row in share]))]
        places = torch.zeros(batch.mask.shape, dtype=torch.int64)
        places[batch.mask] = torch.tensor([place for _, of_row in read for place in of_row])
        return replace(batch, sequences=[sequence for sequence, _ in read], places=places)

    def _read(self, batch: Rollouts, sample: int) -> tuple[list[int], list[int]]:
        """The reader's tokens of a sample, and the place of the last one before each token of the response."""
        prompt, response = batch.prompt_of(sample), batch.response_ids(sample)
        behind = [] if self.writer.templates(prompt.raw_prompt) else prompt.token_ids
        try:
            read_prompt = encode_prompt(prompt.raw_prompt, self.reader)
        except ValueError as error:
            raise ValueError(f"the critic cannot read data row {prompt.index}: {error}") from error
        answer = self.reader.encode(self.writer.decode_after(behind, response), add_special_tokens=False)
        starts = self.writer.reach(response, behind=behind, half=0)[:-1]
        reach = self.reader.reach(answer, half=1)
        places = [len(read_prompt) - 2 + bisect_right(reach, start) for start in starts]
        return [*read_prompt, *answer, self.reader.eos_token_id], places
