"""Prompts from data files, in an order that is a pure function of seed and position.

Every rank reads the same files and takes the same prompts from the same position without communication; a position is
two integers. The ranks of a host divide the check of all rows, which encodes every prompt; later a rank reads the
prompts that it draws or learns from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from megarl.batch import Prompt, PromptList, Prompts
from megarl.data.census import Census
from megarl.data.columns import BY_SOURCE, Needs, PromptColumns
from megarl.data.config import DataSection
from megarl.data.encoded import EncodedPrompt, encode_once
from megarl.data.findings_cache import digest_of
from megarl.data.messages import as_read, encode_prompt, frame, plain_text
from megarl.data.order import Order, Position
from megarl.data.table import DataRow
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import on_first_rank
from megarl.platform.errors import UserError, placed

_READ = (
    "prompt_key",
    "max_prompt_length",
    "truncation",
    "filter_overlong_prompts",
    "reward_fn_key",
    "prompt_id_key",
    "max_prompt_id_length",
)
"""Keys of the section that decide which rows are valid, and their tokens."""


class PromptDataset:
    """The prompts of data files, with the ground truth for the reward.

    The tokenizer decides whether a prompt goes through the chat template; if not, its text is encoded with the special
    tokens that the tokenizer adds to a text. The constructor checks and encodes all prompts, unless an earlier run on
    this host has done so with the same files, tokenizer and keys. `num_filtered` prompts are dropped.
    """

    def __init__(
        self,
        section: DataSection,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        needs: Needs = BY_SOURCE,
    ) -> None:
        """Open the files and check every row; `needs` lists the columns that scoring reads. Collective.

        Raises:
            UserError: a file cannot be read or lacks columns; a row is invalid, lacks a value that scoring needs, or
                is longer than `max_prompt_length` unless the section says to cut or to drop it; a chat template has
                written most of the prompts already, and the section would read them otherwise.
        """
        self._section = section
        self._tokenizer = tokenizer
        self._columns = PromptColumns(section=section, needs=needs)
        self._rows = self._columns.open(files)
        self._census = Census(tokenizer)
        digest = on_first_rank(lambda: self._digest(needs))
        self._encoded = encode_once(self._rows, self._encode, self._census, digest=digest)
        if not len(self._encoded):
            raise UserError(f"every prompt is longer than data.max_prompt_length={section.max_prompt_length}: raise it")
        self.num_filtered = len(self._rows) - len(self._encoded)
        self.remark = self._census.conclude(self._encoded.counts)

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> Prompt:
        number = int(self._encoded.rows[index])
        row = self._rows[number]
        return Prompt(
            index=number,
            token_ids=self._encoded.token_ids(index),
            text=self._encoded.text(index),
            data_source=self._columns.source(row),
            ground_truth=self._columns.ground_truth(row),
            extra_info=self._columns.extra_info(row) | self._raw(row),
            raw_prompt=row[self._section.prompt_key],
            prompt_id=self._columns.prompt_id(row),
        )

    def read(self, indices: Sequence[int]) -> PromptList:
        """Return the prompts at the given places, which are read when they are asked for."""
        lengths = torch.from_numpy(self._encoded.lengths[list(indices)])
        return PromptList.read_by(
            lambda place: self[indices[place]], lengths, lambda place: self._source(indices[place])
        )

    def _source(self, index: int) -> str:
        return self._columns.source(self._rows[int(self._encoded.rows[index])])

    def as_read(self, prompt: Prompt) -> str:
        """Describe how the model reads the first prompt."""
        return as_read("the first prompt", prompt.raw_prompt, list(prompt.token_ids), self._tokenizer)

    def _digest(self, needs: Needs) -> str | None:
        """Return a name for the tokens of all prompts; None if they are those of this run alone."""
        tokenizer = self._tokenizer.digest
        if tokenizer is None:
            return None
        return digest_of(
            self._rows.names, [tokenizer, asdict(needs), {key: getattr(self._section, key) for key in _READ}]
        )

    def _encode(self, row: DataRow) -> EncodedPrompt | None:
        """Return the prompt of a row; None if it is too long and dropped. Raises UserError for an invalid row."""
        faults = list(self._columns.faults(row))
        if faults:
            raise UserError("; ".join(f"column {fault}" for fault in faults))
        token_ids = self._tokens(row)
        limit = self._section.max_prompt_length
        self._census.see(row[self._section.prompt_key])
        if len(token_ids) > limit:
            if self._section.filter_overlong_prompts:
                return None
            if self._section.truncation == "error":
                raise UserError(
                    f"column {self._section.prompt_key}: the prompt has {len(token_ids)} tokens, but "
                    f"data.max_prompt_length is {limit}: raise it, or set data.filter_overlong_prompts=true or "
                    "data.truncation=left|right|middle"
                )
            token_ids = self._cut(row, token_ids)
        return EncodedPrompt(token_ids=token_ids, text=self._tokenizer.decode(token_ids))

    def _cut(self, row: DataRow, token_ids: list[int]) -> list[int]:
        """Cut a prompt that is too long. UserError if what every prompt needs does not fit."""
        prompt = row[self._section.prompt_key]
        limit = self._section.max_prompt_length
        begin, end = frame(prompt, token_ids, self._tokenizer)
        if begin + end >= limit:
            raise UserError(
                f"column {self._section.prompt_key}: the prompt is cut to data.max_prompt_length={limit} tokens, but "
                f"{begin + end} tokens begin a text and the response in every prompt: raise the limit"
            )
        return truncate(token_ids, limit, self._section.truncation, begin=begin, end=end)

    def _tokens(self, row: DataRow) -> list[int]:
        with placed(f"column {self._section.prompt_key}: "):
            return encode_prompt(row[self._section.prompt_key], self._tokenizer)

    def _raw(self, row: DataRow) -> DataRow:
        """Return the forms of the prompt that reward functions receive in `extra_info`."""
        prompt = row[self._section.prompt_key]
        forms = {}
        if self._section.return_raw_chat:
            forms["raw_chat"] = prompt
        if self._section.return_raw_input_ids:
            forms["raw_input_ids"] = self._tokenizer.encode(plain_text(prompt), add_special_tokens=False)
        return forms


def truncate(token_ids: list[int], limit: int, where: str, *, begin: int, end: int) -> list[int]:
    """Cut a prompt to `limit` tokens on the `left`, on the `right` or in the `middle`.

    Its first `begin` and its last `end` tokens, fewer than `limit`, stay.
    """
    if len(token_ids) <= limit:
        return token_ids
    head = {"left": begin, "right": limit - end, "middle": min(max(limit // 2, begin), limit - end)}[where]
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


class PromptStream:
    """A data set in batches: endless and shuffled by epoch for training, once through for validation."""

    def __init__(self, dataset: PromptDataset, *, batch_size: int | None, shuffle: bool, seed: int) -> None:
        """Set up the order; a `batch_size` of None means all prompts."""
        self._dataset = dataset
        self._order = Order(len(dataset), batch_size=batch_size, shuffle=shuffle, seed=seed)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass. Raises UserError if there is none."""
        return self._order.steps_per_epoch

    @property
    def sizes(self) -> dict[str, int]:
        """The number of prompts, and the number of dropped prompts, for a table."""
        return {"prompts": len(self._dataset), "left out": self._dataset.num_filtered}

    @property
    def remark(self) -> str:
        """A line about all rows; empty if there is nothing to say."""
        return self._dataset.remark

    def preview_prompt(self, position: Position) -> str:
        """Describe how the model reads the prompt at `position`, and remark on all rows."""
        prompts, _ = self.take(position, 1)
        return f"{self._dataset.as_read(prompts.prompts[0])}{self.remark}"

    def position_of(self, step: int) -> Position:
        """Return the position after `step` batches."""
        return self._order.position_of(step)

    def require(self, count: int) -> None:
        """Raise UserError if an epoch has fewer than `count` prompts."""
        self._order.require(count)

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        """Return the next `count` prompts (None: a batch), all of one epoch, and the position after them.

        The incomplete batch at the end of an epoch is dropped. Raises UserError if an epoch has fewer than `count`
        prompts.
        """
        rows, next_position = self._order.take(position, count)
        return self._prompts(rows), next_position

    def prompt_of(self, row: int) -> Prompt:
        """Return the prompt of a row of the data set. Raises IndexError if there is no such row."""
        if not 0 <= row < len(self._dataset):
            raise IndexError(row)
        return self._dataset[row]

    def batches(self) -> Iterator[Prompts]:
        """Yield every prompt once, in file order; the last batch may be smaller."""
        return map(self._prompts, self._order.once_through())

    def _prompts(self, indices: Sequence[int]) -> Prompts:
        return Prompts(prompts=self._dataset.read(indices))
