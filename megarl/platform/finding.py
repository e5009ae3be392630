"""A row of the tables that `megarl doctor` prints."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """A row of the table: the subject, the finding and, unless all is well, advice."""

    name: str
    found: str
    advice: str = ""
    verdict: Verdict = "good"
    command: str = ""
    """The remedy as a command line, which is printed below the table so that no cell breaks it."""
