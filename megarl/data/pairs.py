"""Pairs of prompt and response from parquet files, for supervised learning, as records the learner already knows."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from megarl.batch import Prompt, Rollouts
from megarl.data.config import SFTDataSection
from megarl.data.order import Order
from megarl.data.parquet import Rows
from megarl.data.prompts import encode_prompt
from megarl.data.tokenizer import Tokenizer


class PairStream:
    """The pairs of parquet files in batches: endless and shuffled by epoch for training, once through for validation.

    A response is encoded without what the tokenizer puts around a text, and ends with its end-of-sequence token. Raises
    ValueError for the first pair longer than `max_length`.
    """

    def __init__(self, section: SFTDataSection, files: str | Sequence[str], tokenizer: Tokenizer) -> None:
        self._section = section
        self._tokenizer = tokenizer
        self._rows = Rows(files, columns=(section.prompt_key, section.response_key))
        self._pairs = [self._encode(index) for index in range(len(self._rows))]
        self._order = Order(
            num_rows=len(self._pairs), batch_size=section.train_batch_size, shuffle=section.shuffle, seed=section.seed
        )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises ValueError where there is not one."""
        return self._order.steps_per_epoch

    def take(self, step: int) -> Rollouts:
        """The pairs of a step, counted from 0 over all epochs; what fills no batch at an epoch's end is left out."""
        rows, _ = self._order.take(self._order.position_of(step), self._section.train_batch_size)
        return self._record(rows)

    def batches(self) -> Iterator[Rollouts]:
        """Every pair once, in file order; the last batch may be smaller."""
        return map(self._record, self._order.once_through())

    def _encode(self, index: int) -> tuple[Prompt, list[int]]:
        row = self._rows[index]
        prompt, response = row[self._section.prompt_key], row[self._section.response_key]
        try:
            if not isinstance(response, str):
                raise ValueError(f"the response is not a text but {response!r}")
            prompt_ids = encode_prompt(prompt, self._tokenizer)
            response_ids = self._tokenizer.encode(response, add_special_tokens=False) + [self._tokenizer.eos_token_id]
            length, limit = len(prompt_ids) + len(response_ids), self._section.max_length
            if length > limit:
                raise ValueError(f"prompt and response have {length} tokens, data.max_length is {limit}: raise it")
        except ValueError as error:
            raise ValueError(f"{self._rows.place(index)}: {error}") from error
        shown = Prompt(
            index=index,
            token_ids=prompt_ids,
            text=self._tokenizer.decode(prompt_ids),
            data_source="",
            ground_truth=response,
            extra_info={},
        )
        return shown, response_ids

    def _record(self, indices: Sequence[int]) -> Rollouts:
        pairs = [self._pairs[index] for index in indices]
        responses = [torch.tensor(response_ids) for _, response_ids in pairs]
        padded = pad_sequence(responses, batch_first=True)
        lengths = torch.tensor([len(response) for response in responses])
        return Rollouts(
            prompts=[prompt for prompt, _ in pairs],
            groups=torch.arange(len(pairs)),
            responses=padded,
            mask=torch.arange(padded.shape[1]) < lengths[:, None],
            rollout_log_probs=torch.zeros(padded.shape),
            truncated=torch.zeros(len(pairs), dtype=torch.bool),
        )
