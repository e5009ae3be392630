"""Pairs of prompt and response from data files, for supervised learning."""

from collections.abc import Iterator, Sequence

import torch

from megarl.batch import Prompt, Rollouts
from megarl.data.census import Census
from megarl.data.config import SFTDataSection
from megarl.data.look import check_rows
from megarl.data.messages import as_read, encode_prompt, text_faults
from megarl.data.order import Order
from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.data.tokenizer import Tokenizer
from megarl.platform.errors import UserError


class PairStream:
    """The pairs of data files in batches: endless and shuffled by epoch for training, once through for validation.

    A response is encoded without special tokens, and ends with an end-of-sequence token. Pairs are read and encoded
    when they are taken; the constructor checks all of them once, on all ranks together. It raises UserError for an
    invalid pair, and for a pair longer than `max_length`, whose key is called `longest` in messages.
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
        remedies = {getattr(section, key): f"data.{key} names another" for key in ("prompt_key", "response_key")}
        self._rows = Rows(files, columns=list(remedies), remedies=remedies)
        self._order = Order(
            len(self._rows), batch_size=section.train_batch_size, shuffle=section.shuffle, seed=section.seed
        )
        self._census = Census(tokenizer)
        check_rows(self._rows, self._check)
        self._remark = self._census.conclude_together()

    @property
    def num_pairs(self) -> int:
        """Pairs in all files."""
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises UserError if there is none."""
        return self._order.steps_per_epoch

    def take(self, step: int) -> Rollouts:
        """Return the pairs of a step, counted from 0 over all epochs; the incomplete batch of an epoch is dropped."""
        rows, _ = self._order.take(self._order.position_of(step))
        return self._record(rows)

    def preview_prompt(self, step: int) -> str:
        """Describe how the model reads the first pair of a step, and remark on all rows."""
        rows, _ = self._order.take(self._order.position_of(step), 1)
        row = self._rows[rows[0]]
        prompt_ids, response_ids = self._encode(row)
        prompt = row[self._section.prompt_key]
        what = "the first prompt with its response"
        return f"{as_read(what, prompt, prompt_ids + response_ids, self._tokenizer)}{self._remark}"

    def batches(self) -> Iterator[Rollouts]:
        """Yield every pair once, in file order; the last batch may be smaller."""
        return map(self._record, self._order.once_through())

    def _check(self, row: DataRow) -> None:
        self._encode(row)
        self._census.see(row[self._section.prompt_key], row[self._section.response_key])

    def _encode(self, row: DataRow) -> tuple[list[int], list[int]]:
        """Return the ids of prompt and response. Raises UserError for an invalid row."""
        prompt = row[self._section.prompt_key]
        response = row[self._section.response_key]
        for fault in text_faults(response):
            raise UserError(f"column {self._section.response_key}: {fault}")
        try:
            prompt_ids = encode_prompt(prompt, self._tokenizer)
        except UserError as error:
            raise UserError(f"column {self._section.prompt_key}: {error}") from error
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
