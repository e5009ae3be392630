"""Pairs of prompt and response from data files, for supervised learning."""

from collections.abc import Sequence

import torch

from megarl.batch import Prompt, Rollouts
from megarl.data.config import SFTDataSection
from megarl.data.messages import as_read, encode_prompt, text_faults
from megarl.data.stream import FileStream
from megarl.data.table import DataRow
from megarl.data.tokenizer import Tokenizer
from megarl.platform.errors import UserError, placed


class PairStream(FileStream[Rollouts]):
    """The pairs of data files.

    A response is encoded without special tokens, and ends with an end-of-sequence token. The constructor also raises
    UserError for a pair longer than `max_length`, whose key is called `longest` in messages.
    """

    def __init__(
        self,
        section: SFTDataSection,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        longest: str = "data.max_length",
    ) -> None:
        self._section = section
        self._longest = longest
        self._tokenizer = tokenizer
        super().__init__(section, files, tokenizer, ("prompt_key", "response_key"))

    def _preview(self, row: DataRow) -> str:
        prompt_ids, response_ids = self._encode(row)
        what = "the first prompt with its response"
        return as_read(what, row[self._section.prompt_key], prompt_ids + response_ids, self._tokenizer)

    def _check(self, row: DataRow) -> None:
        self._encode(row)
        self._census.see(row[self._section.prompt_key], row[self._section.response_key])

    def _encode(self, row: DataRow) -> tuple[list[int], list[int]]:
        """Return the ids of prompt and response. Raises UserError for an invalid row."""
        prompt = row[self._section.prompt_key]
        response = row[self._section.response_key]
        for fault in text_faults(response):
            raise UserError(f"column {self._section.response_key}: {fault}")
        with placed(f"column {self._section.prompt_key}: "):
            prompt_ids = encode_prompt(prompt, self._tokenizer)
        response_ids = self._tokenizer.encode(response, add_special_tokens=False) + [self._tokenizer.eos_token_id]
        length = len(prompt_ids) + len(response_ids)
        limit = self._section.max_length
        if length > limit:
            raise UserError(
                f"column {self._section.response_key}: prompt and response have {length} tokens, but "
                f"{self._longest} is {limit}: raise it"
            )
        return prompt_ids, response_ids

    def _record(self, indices: Sequence[int]) -> Rollouts:
        prompts: list[Prompt] = []
        responses: list[torch.Tensor] = []
        for index in indices:
            row = self._rows[index]
            prompt_ids, response_ids = self._encode(row)
            prompts.append(
                Prompt(
                    index=index,
                    token_ids=prompt_ids,
                    text=self._tokenizer.decode(prompt_ids),
                    data_source="",
                    ground_truth=row[self._section.response_key],
                    extra_info={},
                    raw_prompt=row[self._section.prompt_key],
                )
            )
            responses.append(torch.tensor(response_ids, dtype=torch.int32))
        tokens = torch.cat(responses)
        return Rollouts(
            prompts=prompts,
            groups=torch.arange(len(prompts)),
            num_tokens=torch.tensor([len(response) for response in responses]),
            responses=tokens,
            mask=torch.ones_like(tokens, dtype=torch.bool),
            rollout_log_probs=None,
            truncated=torch.zeros(len(prompts), dtype=torch.bool),
        )
