"""Prompts with their answers, each as one sequence of tokens that is scored as a whole.

The score of a sequence stands where transformers' sequence classifiers have it: at its last token that is not the pad
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import Prompt, Rollouts
from megarl.data.messages import as_messages, plain_text
from megarl.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """How the model that scores wants its sequences."""

    tokenizer: Tokenizer
    pad_token_id: int | None  # of its config.json; None: every last token counts
    max_length: int  # tokens

    def encode(self, prompt: Any, answer: str) -> list[int]:
        """Return the sequence of a prompt (a list of `{role, content}`, or a text) and the assistant's answer to it.

        What goes through the chat template has its special tokens alone; a text continues in the answer, with what the
        tokenizer puts around a text.

        Raises:
            ValueError: the prompt is neither, or the template refuses it.
        """
        messages = as_messages(prompt, self.tokenizer)
        if messages is None:
            return self.fit(self.tokenizer.encode(plain_text(prompt) + answer, add_special_tokens=True))
        return self.fit(self.tokenizer.chat([*messages, {"role": "assistant", "content": answer}], is_complete=True))

    def fit(self, token_ids: Sequence[int]) -> list[int]:
        """The sequence without pad tokens at its end and cut to `max_length`.

        It is cut on the left, as its end is what is judged; a beginning-of-sequence token stays.
        """
        if not token_ids:
            raise ValueError("a sequence to be scored has no token")
        ids = list(token_ids)
        if len(ids) > self.max_length:
            begin = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []
            ids = begin + ids[len(ids) - self.max_length + len(begin) :]
        while len(ids) > 1 and ids[-1] == self.pad_token_id:
            ids.pop()
        return ids


def scoring_batch(sequences: Sequence[Sequence[int]]) -> Rollouts:
    """A record of which a value model says the scores: `[B, 1]` values, that of sequence `i` in row `i`.

    Each sequence is a prompt, and one token that no model computes is its response: the value of the state before it is
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
        responses=torch.zeros(num, 1, dtype=torch.int64),
        mask=torch.ones(num, 1, dtype=torch.bool),
        rollout_log_probs=torch.zeros(num, 1),
        truncated=torch.zeros(num, dtype=torch.bool),
    )
