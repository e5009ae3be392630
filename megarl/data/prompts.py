"""Prompts from parquet files, in an order that is a pure function of seed and position.

Every rank reads the same files and takes the same prompts from the same position, with no messages; two integers say
where a run stands.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.batch import Prompt, Prompts
from megarl.data.config import DataSection
from megarl.data.order import Order, Position
from megarl.data.parquet import Rows
from megarl.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class PromptDataset:
    """The prompts of parquet files with columns `prompt, data_source, reward_model{ground_truth}[, extra_info]`.

    A prompt that is a list of `{role, content}` goes through the chat template; a plain string is encoded as it is,
    with what the tokenizer puts around a text. Prompts are tokenised when they are asked for; over-long ones are looked
    for once, here. Raises ValueError for the first prompt longer than `max_prompt_length` unless the section says to
    cut it or to leave it out.
    """

    def __init__(self, section: DataSection, files: str | Sequence[str], tokenizer: Tokenizer) -> None:
        self._section = section
        self._tokenizer = tokenizer
        columns = (section.prompt_key, section.reward_fn_key, "reward_model")
        self._rows = Rows(files, columns=columns, optional=["extra_info"])
        self._kept: Sequence[int] = range(len(self._rows))
        if section.filter_overlong_prompts:
            self._kept = self._short_enough()
        elif section.truncation == "error":
            self._refuse_overlong()
        self.num_filtered = len(self._rows) - len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._kept[index]
        row = self._rows[row_number]
        token_ids = truncate(self._encode(row, row_number), self._section.max_prompt_length, self._section.truncation)
        return Prompt(
            index=row_number,
            token_ids=token_ids,
            text=self._tokenizer.decode(token_ids),
            data_source=str(row[self._section.reward_fn_key]),
            ground_truth=self._ground_truth(row, row_number),
            extra_info=row.get("extra_info") or {},
            raw_prompt=row[self._section.prompt_key],
        )

    def _encode(self, row: dict[str, Any], row_number: int) -> list[int]:
        try:
            return encode_prompt(row[self._section.prompt_key], self._tokenizer)
        except ValueError as error:
            raise ValueError(f"{self._rows.place(row_number)}, column {self._section.prompt_key}: {error}") from error

    def _ground_truth(self, row: dict[str, Any], row_number: int) -> Any:
        reward_model = row["reward_model"]
        if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
            raise ValueError(f"{self._rows.place(row_number)}: reward_model has no ground_truth: {reward_model!r}")
        return reward_model["ground_truth"]

    def _lengths(self) -> Iterator[int]:
        return (len(self._encode(row, row_number)) for row_number, row in enumerate(self._rows))

    def _short_enough(self) -> list[int]:
        limit = self._section.max_prompt_length
        kept = [row_number for row_number, length in enumerate(self._lengths()) if length <= limit]
        if not kept:
            raise ValueError(f"every prompt is longer than data.max_prompt_length={limit}: nothing is left; raise it")
        logger.info(
            "left out %d of %d prompts longer than %d tokens", len(self._rows) - len(kept), len(self._rows), limit
        )
        return kept

    def _refuse_overlong(self) -> None:
        limit = self._section.max_prompt_length
        for row_number, length in enumerate(self._lengths()):
            if length > limit:
                raise ValueError(
                    f"{self._rows.place(row_number)}: the prompt has {length} tokens, data.max_prompt_length is "
                    f"{limit}: raise it, or set data.filter_overlong_prompts=true or data.truncation=left|right|middle"
                )


def truncate(token_ids: list[int], limit: int, where: str) -> list[int]:
    """Cut a prompt to `limit` tokens on the `left`, on the `right` or in the `middle`."""
    if len(token_ids) <= limit:
        return token_ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[where]
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


def encode_prompt(prompt: object, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text, or of a list of messages `{role, content}` under the chat template.

    Raises ValueError for anything else, and where nothing comes out.
    """
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt, add_special_tokens=True)
    elif isinstance(prompt, list) and prompt:
        token_ids = tokenizer.chat(prompt)
    else:
        raise ValueError(f"{prompt!r} is neither a text nor a list of messages")
    if not token_ids:
        raise ValueError("the prompt has no token")
    return token_ids


class PromptStream:
    """A data set in batches: endless and shuffled by epoch for training, once through for validation."""

    def __init__(self, dataset: PromptDataset, *, batch_size: int | None, shuffle: bool, seed: int) -> None:
        self._dataset = dataset
        num_rows = len(dataset)
        self._order = Order(num_rows=num_rows, batch_size=batch_size or num_rows, shuffle=shuffle, seed=seed)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises ValueError where there is not one."""
        return self._order.steps_per_epoch

    def position_of(self, step: int) -> Position:
        """Where a run stands that has taken `step` batches."""
        return self._order.position_of(step)

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        """The next `count` prompts (default: a batch), and the position behind them.

        All are of one epoch; what fills no batch at its end is left out. Raises ValueError where no epoch has so many.
        """
        rows, behind = self._order.take(position, self._order.batch_size if count is None else count)
        return self._prompts(rows), behind

    def batches(self) -> Iterator[Prompts]:
        """Every prompt once, in file order; the last batch may be smaller."""
        return map(self._prompts, self._order.once_through())

    def _prompts(self, indices: Sequence[int]) -> Prompts:
        return Prompts(prompts=[self._dataset[index] for index in indices])
