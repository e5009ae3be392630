"""The protocol of an environment. The processes that environments run in import it: no torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Observation = str | list[dict[str, Any]]
"""A text, or messages `{role, content}`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The row of the data set that an episode starts from."""

    prompt: Observation  # as the file has it
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    index: int  # its position in the data set
    seed: int  # the same in every episode of the row


class Step(NamedTuple):
    """The answer to a turn. A plain tuple of three does as well."""

    observation: Observation | None  # what the policy reads next; nothing reads it if the episode is `done`
    reward: float  # of this turn alone
    done: bool


class Environment(Protocol):
    """One episode at a time. An instance is made for each episode.

    An environment must answer the same to the same row and responses: if its process is lost, another plays the same
    responses again.
    """

    def reset(self, row: Row) -> Observation:
        """Return the prompt of an episode: often `row.prompt`."""

    def step(self, response: str) -> Step:
        """Answer the policy's turn, a text without the token that ends it."""
