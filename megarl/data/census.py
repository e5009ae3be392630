"""Counts rows that a chat template has written already, and rows that spell special tokens, before a run starts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from megarl.data.messages import Written, content_of, shown
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import together
from megarl.platform.errors import UserError

OPENINGS = re.compile(r"<\|im_start\|>assistant|<\|start_header_id\|>assistant|<start_of_turn>model|<｜Assistant｜>")
"""How well-known templates begin the turn of the assistant."""
BECOMES = {"split": "letters", "allow": "these tokens"}
"""Value of data.special_tokens_in_text -> what becomes of the names."""
_ASKS = re.compile(r"\b(user|human)\s*:", re.IGNORECASE)
_RESPONDS = re.compile(r"\b(assistant|ai)\s*:", re.IGNORECASE)
_SHOWN = 60  # characters of the end of a prompt


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of rows, and the first examples."""

    rows: int = 0
    spelling: int = 0  # rows with the name of a special token
    written: int = 0  # prompts that a template has written
    templated: int = 0  # prompts that go through the chat template
    name: str | None = None  # of a special token
    end: str | None = None  # of a prompt that a template has written

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            rows=self.rows + other.rows,
            spelling=self.spelling + other.spelling,
            written=self.written + other.written,
            templated=self.templated + other.templated,
            name=self.name or other.name,
            end=self.end or other.end,
        )


class Census:
    """Counts the rows that a rank checks, and concludes from those of all ranks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Count rows that `tokenizer` reads."""
        self._tokenizer = tokenizer
        self.counts = Counts()

    def see(self, prompt: Written, *responses: str) -> None:
        """Count a row without faults."""
        name = self._tokenizer.spelt_in(prompt, *responses)
        text = prompt if isinstance(prompt, str) else content_of(prompt[-1])
        is_templated = self._tokenizer.templates(prompt)
        is_written = self._begins_with_token(text) or (is_templated and opens_a_turn(text))
        self.counts += Counts(
            rows=1,
            spelling=name is not None,
            written=is_written,
            templated=is_templated,
            name=name,
            end=shown(text[-_SHOWN:]) if is_written else None,
        )

    def conclude_together(self) -> str:
        """Conclude from the rows that all ranks have seen. Collective. Raises as `conclude` does."""
        return self.conclude(reduce(Counts.__add__, together(lambda: self.counts)))

    def conclude(self, counts: Counts) -> str:
        """Return a line about all rows; empty if there is nothing to say.

        Raises:
            UserError: a template has written most of the prompts, and the configuration would read them otherwise.
        """
        remedies = list(self._remedies(counts))
        if 2 * counts.written > counts.rows and remedies:
            raise UserError(
                f"{counts.written} of {counts.rows} prompts hold a chat template already; the first ends in "
                f"{counts.end}. Write {' and '.join(remedies)} to read the prompts as they are, or remove the template "
                "from the files"
            )
        if not counts.spelling:
            return ""
        spelling = self._tokenizer.spelling
        return (
            f"\n{counts.spelling} of {counts.rows} rows hold names of special tokens such as {counts.name!r}: "
            f"data.special_tokens_in_text={spelling} reads them as {BECOMES[spelling]}"
        )

    def _remedies(self, counts: Counts) -> Iterator[str]:
        if counts.templated:
            yield "data.apply_chat_template=false"
        if counts.spelling and self._tokenizer.spelling == "split":
            yield "data.special_tokens_in_text=allow"

    def _begins_with_token(self, text: str) -> bool:
        name = self._tokenizer.spelt_in(text)
        return name is not None and text.lstrip().startswith(name)


def opens_a_turn(text: str) -> bool:
    """Return whether a text is a dialogue whose next words are the assistant's."""
    if OPENINGS.search(text):
        return True
    end = text.rstrip()
    line = end.removesuffix("<think>").rstrip().rpartition("\n")[2]
    responds = list(_RESPONDS.finditer(line))
    is_open = bool(responds) and (end.endswith("<think>") or responds[-1].end() == len(line))
    return is_open and _ASKS.search(text) is not None
