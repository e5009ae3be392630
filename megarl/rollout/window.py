"""The work of the replicas between two exchanges, and the exchange: a few whole numbers of each sample, no token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Elsewhere, Generation, Sample, float32, int32
from megarl.distributed.all_gather import all_gather
from megarl.distributed.exchange import on_each_rank, waiting

NUM_COUNTS = 4
KNOWN = ("prompt", "sample", "num_tokens", "num_learnt", "num_turns", "has_log_probs", "truncated", "complete")
"""The fields of a sample that other replicas know."""


@dataclass(frozen=True)
class Window:
    """The work of one replica between two exchanges."""

    finished: Sequence[Sample]
    num_steps: int = 0
    num_running: int = 0  # samples that were drawn at once, summed over the steps
    waiting: Sequence[int] = ()  # groups without room

    def counts(self) -> list[int]:
        """Return `NUM_COUNTS` numbers: those that size the content first."""
        return [len(self.finished), len(self.waiting), self.num_steps, self.num_running]

    def content(self) -> Tensor:
        """Return what other replicas know of the samples, and the groups without room: int64."""
        of_samples = [int(getattr(sample, name)) for sample in self.finished for name in KNOWN]
        return torch.tensor([*of_samples, *self.waiting], dtype=torch.int64)

    @classmethod
    def from_afar(cls, counts: Sequence[int], content: Sequence[int], *, replica: int) -> "Window":
        """Return the window of another replica, from its counts and its content."""
        num_finished, _, num_steps, num_running = counts
        size = num_finished * len(KNOWN)
        firsts = range(0, size, len(KNOWN))
        finished = [_from_afar(content[first : first + len(KNOWN)], replica=replica) for first in firsts]
        return cls(finished, num_steps=num_steps, num_running=num_running, waiting=content[size:])


def exchange(work: Callable[[], Window], ranks: Sequence[int]) -> list[Window]:
    """Work, and return the windows of all replicas, in their order; of other replicas without tokens. Collective.

    Args:
        work: the work of this rank's replica.
        ranks: one of each replica, in their order; this rank is one of them.

    Raises:
        Exception: if each replica is one rank, a failed rank raises its own error and all others that of the lowest
            failed rank. In a larger replica, the other ranks may wait for the failed rank in a collective of vLLM, and
            no message reaches them there. The failed rank then raises its error at once, which ends the job.
    """
    failure: Exception | None = None
    window = Window(())
    try:
        window = work()
    except Exception as error:
        if len(ranks) < dist.get_world_size():
            raise
        failure = error
    with waiting():
        mine = torch.tensor([failure is not None, *window.counts()], dtype=torch.int64)
        gathered = torch.stack(all_gather(mine, ranks, [1 + NUM_COUNTS] * len(ranks)))
    if gathered[:, 0].any():
        on_each_rank(partial(_raise, failure))
    counts = gathered[:, 1:].tolist()
    sizes = [num_finished * len(KNOWN) + num_waiting for num_finished, num_waiting, *_ in counts]
    content = torch.cat(all_gather(window.content(), ranks, sizes)).tolist()
    ends = accumulate(sizes)
    here = ranks.index(dist.get_rank())
    return [
        window if replica == here else Window.from_afar(of_replica, content[end - size : end], replica=replica)
        for replica, (of_replica, size, end) in enumerate(zip(counts, sizes, ends, strict=True))
    ]


def _from_afar(row: Sequence[int], *, replica: int) -> Sample:
    """Return a sample of another replica. One without tokens may still be drawn here."""
    prompt, number, num_tokens, num_learnt, num_turns, has_log_probs, truncated, complete = row
    if not num_tokens and not complete:
        return Generation(prompt, int32(), float32(), truncated=False, sample=number, complete=False)
    return Elsewhere(
        prompt,
        number,
        replica=replica,
        num_tokens=num_tokens,
        num_learnt=num_learnt,
        num_turns=num_turns,
        has_log_probs=bool(has_log_probs),
        truncated=bool(truncated),
        complete=bool(complete),
    )


def _raise(error: Exception | None) -> None:
    if error:
        raise error
