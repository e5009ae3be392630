"""Prompts from parquet files, in an order that is a pure function of seed and position.

Every rank reads the same files and takes the same prompts from the same position, with no messages; two integers say
where a run stands. Only the first look at all rows, which tokenises every prompt, is shared out among the ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch import Prompt, Prompts
from megarl.data.config import DataSection
from megarl.data.messages import as_read, encode_prompt, plain_text
from megarl.data.order import Chunk, Order, Position
from megarl.data.parquet import Rows
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import in_shares

Row = dict[str, Any]


class PromptDataset:
    """The prompts of parquet files with columns `prompt, data_source, reward_model{ground_truth}[, extra_info]`.

    The tokenizer says whether a prompt goes through the chat template; if not, its text is encoded with what the
    tokenizer puts around a text. Prompts are read and tokenised when they are asked for; those to leave
    out are looked for once, here, all ranks of a job together. `num_filtered` are left out.

    Raises ValueError for a prompt longer than `max_prompt_length` unless the section says to cut it or to leave it
    out, and for an id longer than `max_prompt_id_length`.
    """

    def __init__(self, section: DataSection, files: str | Sequence[str], tokenizer: Tokenizer) -> None:
        self._section = section
        self._tokenizer = tokenizer
        columns = [section.prompt_key, section.reward_fn_key, "reward_model"]
        columns += [section.prompt_id_key] if section.prompt_id_key else []
        self._rows = Rows(files, columns=columns, optional=["extra_info"])
        self._measured = section.filter_overlong_prompts or section.truncation == "error"
        self._kept: range | NDArray[np.int64] = range(len(self._rows))
        if self._measured or section.max_prompt_id_length:
            self._kept = np.concatenate(in_shares(len(self._rows), self._look_through))
        if not len(self._kept):
            raise ValueError(
                f"every prompt is longer than data.max_prompt_length={section.max_prompt_length}: nothing is left; "
                "raise it"
            )
        self.num_filtered = len(self._rows) - len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        number = int(self._kept[index])
        row = self._rows[number]
        token_ids = truncate(self._encode(row, number), self._section.max_prompt_length, self._section.truncation)
        return Prompt(
            index=number,
            token_ids=token_ids,
            text=self._tokenizer.decode(token_ids),
            data_source=str(row[self._section.reward_fn_key]),
            ground_truth=self._ground_truth(row, number),
            extra_info=(row.get("extra_info") or {}) | self._raw(row),
            raw_prompt=row[self._section.prompt_key],
            prompt_id=self._prompt_id(row, number),
        )

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of the files, of which only the prompts that are not left out count."""
        ends = np.cumsum([chunk.num_rows for chunk in self._rows.chunks])
        sizes = np.diff(np.searchsorted(self._kept, ends), prepend=0).tolist()
        pairs = zip(sizes, self._rows.chunks, strict=True)
        return [Chunk(num_rows=size, num_bytes=chunk.num_bytes) for size, chunk in pairs if size]

    def as_read(self, prompt: Prompt) -> str:
        """Describe for people how the model reads the first prompt."""
        return as_read("the first prompt", prompt.raw_prompt, prompt.token_ids, self._tokenizer)

    def _look_through(self, share: range) -> NDArray[np.int64]:
        """The rows of a share that are not left out; ValueError for the first that must not be."""
        rows = zip(share, self._rows.scan(share), strict=True)
        return np.fromiter((number for number, row in rows if self._stays(row, number)), np.int64)

    def _stays(self, row: Row, number: int) -> bool:
        self._prompt_id(row, number)
        limit = self._section.max_prompt_length
        length = len(self._encode(row, number)) if self._measured else 0
        if length > limit and not self._section.filter_overlong_prompts:
            raise ValueError(
                f"{self._rows.place(number)}: the prompt has {length} tokens, data.max_prompt_length is {limit}: "
                "raise it, or set data.filter_overlong_prompts=true or data.truncation=left|right|middle"
            )
        return length <= limit

    def _encode(self, row: Row, number: int) -> list[int]:
        try:
            return encode_prompt(row[self._section.prompt_key], self._tokenizer)
        except ValueError as error:
            raise ValueError(f"{self._rows.place(number)}, column {self._section.prompt_key}: {error}") from error

    def _raw(self, row: Row) -> Row:
        """What reward functions are told of the prompt beside its answer."""
        prompt, told = row[self._section.prompt_key], {}
        if self._section.return_raw_chat:
            told["raw_chat"] = prompt
        if self._section.return_raw_input_ids:
            told["raw_input_ids"] = self._tokenizer.encode(plain_text(prompt), add_special_tokens=False)
        return told

    def _prompt_id(self, row: Row, number: int) -> str | None:
        value = row[self._section.prompt_id_key] if self._section.prompt_id_key else None
        if value is None:
            return None
        limit = self._section.max_prompt_id_length
        if limit and len(str(value)) > limit:
            raise ValueError(
                f"{self._rows.place(number)}, column {self._section.prompt_id_key}: {value!r} has {len(str(value))} "
                f"characters, data.max_prompt_id_length is {limit}: raise it"
            )
        return str(value)

    def _ground_truth(self, row: Row, number: int) -> Any:
        reward_model = row["reward_model"]
        if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
            raise ValueError(f"{self._rows.place(number)}: reward_model has no ground_truth: {reward_model!r}")
        return reward_model["ground_truth"]


def truncate(token_ids: list[int], limit: int, where: str) -> list[int]:
    """Cut a prompt to `limit` tokens on the `left`, on the `right` or in the `middle`."""
    if len(token_ids) <= limit:
        return token_ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[where]
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


class PromptStream:
    """A data set in batches: endless and shuffled by epoch for training, once through for validation."""

    def __init__(self, dataset: PromptDataset, *, batch_size: int | None, shuffle: bool, seed: int) -> None:
        """A `batch_size` of None is all prompts."""
        self._dataset = dataset
        self._order = Order(dataset.chunks, batch_size=batch_size, shuffle=shuffle, seed=seed)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises ValueError where there is not one."""
        return self._order.steps_per_epoch

    @property
    def sizes(self) -> dict[str, int]:
        """How many prompts there are, and how many were left out, for a table."""
        return {"prompts": len(self._dataset), "left out": self._dataset.num_filtered}

    def first_as_read(self, position: Position) -> str:
        """Describe for people how the model reads the prompt at `position`."""
        prompts, _ = self.take(position, 1)
        return self._dataset.as_read(prompts.prompts[0])

    def position_of(self, step: int) -> Position:
        """Where a run stands that has taken `step` batches."""
        return self._order.position_of(step)

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        """The next `count` prompts (None: a batch), all of one epoch, and the position behind them.

        What fills no batch at an epoch's end is left out. Raises ValueError where no epoch has so many.
        """
        rows, behind = self._order.take(position, count)
        return self._prompts(rows), behind

    def batches(self) -> Iterator[Prompts]:
        """Every prompt once, in file order; the last batch may be smaller."""
        return map(self._prompts, self._order.once_through())

    def _prompts(self, indices: Sequence[int]) -> Prompts:
        return Prompts(prompts=[self._dataset[index] for index in indices])
