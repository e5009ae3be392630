"""The limits of the processes that call rules or environments."""

from dataclasses import dataclass
from typing import Literal

Isolation = Literal["response", "process"]
"""Whether a process handles one request and ends, or one request after another."""


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """The limits of the processes of one rank, and what they share."""

    num_workers: int  # at the same time
    timeout_s: float
    max_memory: int  # bytes of private memory of one process
    num_together: int = 1  # responses that a process handles at once
    isolation: Isolation = "response"
    max_reply: int = 1 << 16  # bytes of the reply for one response
    canary_every: int = 0  # requests to a process after which it scores a canary; 0 = never
