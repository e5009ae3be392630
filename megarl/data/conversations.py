"""Prompts with their responses, each as one sequence of tokens that a model scores.

The score of a sequence is at the position that transformers' sequence classifiers use: at its last token that is not
the pad token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.batch import Prompt, Rollouts
from megarl.data.messages import Written, as_messages, plain_text
from megarl.data.tokenizer import Tokenizer
from megarl.platform.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Encodes conversations for the model that scores them."""

    tokenizer: Tokenizer
    pad_token_id: int | None  # of its config.json; None: the last token counts in any case
    max_length: int  # tokens

    def encode(self, prompt: Written, response: str) -> list[int]:
        """Return the sequence of a prompt (a list of `{role, content}`, or a text) and the assistant's response.

        Messages get the special tokens of the chat template alone. A text prompt is continued by the response, and gets
        the special tokens that the tokenizer adds to a text.

        Raises:
            UserError: the prompt is neither, or the template refuses it.
        """
        messages = as_messages(prompt, self.tokenizer)
        if messages is None:
            return self.fit(self.tokenizer.encode(plain_text(prompt) + response, add_special_tokens=True))
        return self.fit(self.tokenizer.chat([*messages, {"role": "assistant", "content": response}], is_complete=True))

    def fit(self, token_ids: Sequence[int]) -> list[int]:
        """Remove pad tokens at the end of a sequence, and cut it to `max_length`.

        The cut is on the left, as the score is at the end; a beginning-of-sequence token stays.
        """
        if not token_ids:
            raise UserError("a sequence to be scored has no token")
        ids = list(token_ids)
        if len(ids) > self.max_length:
            begin = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []
            ids = begin + ids[len(ids) - self.max_length + len(begin) :]
        while len(ids) > 1 and ids[-1] == self.pad_token_id:
            ids.pop()
        return ids


def scoring_batch(sequences: Sequence[Sequence[int]]) -> Rollouts:
    """Return a record with one sample per sequence: a model's values of it are the scores, in this order.

    Each sequence becomes a prompt whose response is one placeholder token: the value of the state before that token is
    the value at the last token of the sequence.
    """
    num = len(sequences)
    prompts = [
        Prompt(index=number, token_ids=sequence, text="", data_source="", ground_truth=None, extra_info={})
        for number, sequence in enumerate(sequences)
    ]
    return Rollouts(
        prompts=prompts,
        groups=torch.arange(num),
        num_tokens=torch.ones(num, dtype=torch.int64),
        responses=torch.zeros(num, dtype=torch.int32),
        mask=torch.ones(num, dtype=torch.bool),
        rollout_log_probs=None,
        truncated=torch.zeros(num, dtype=torch.bool),
    )
