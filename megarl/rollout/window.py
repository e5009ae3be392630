"""The work of the replicas between two exchanges, and the exchange: a few whole numbers of each sample, no token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Generation, Sample
from megarl.columns import on_tokens
from megarl.distributed.all_gather import all_gather
from megarl.distributed.exchange import on_each_rank, waiting
from megarl.rollout.table import FIELDS

NUM_COUNTS = 4
KNOWN = tuple(name for name in FIELDS if name != "replica")
"""The fields of a sample that replicas tell each other."""


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


def sizes_of(counts: Tensor) -> Tensor:
    """Return the sizes of the contents of windows, `[R]` int64, from their counts, `[R, NUM_COUNTS]`."""
    return counts[:, 0] * len(KNOWN) + counts[:, 1]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The work of all `R` replicas between two exchanges, of other replicas without tokens."""

    counts: Tensor  # [R, NUM_COUNTS] int64
    content: Tensor  # int64: the contents of the windows, end to end
    mine: Window  # of this rank's replica
    here: int  # this rank's replica

    @cached_property
    def finished(self) -> Tensor:
        """The fields of `RemoteSample` of all `F` finished samples, replica by replica: `[9, F]` int64."""
        known = self.content[self._is_of_samples].view(-1, len(KNOWN)).T
        replicas = on_tokens(torch.arange(len(self)), self.counts[:, 0])
        is_blank = (known[KNOWN.index("num_tokens")] == 0) & (known[KNOWN.index("complete")] == 0)
        replicas.masked_fill_(is_blank, Generation.replica)  # it may still be drawn here
        rows = dict(zip(KNOWN, known, strict=True)) | {"replica": replicas}
        return torch.stack([rows[name] for name in FIELDS])

    @cached_property
    def waiting(self) -> list[list[int]]:
        """The groups without room of each replica."""
        groups = self.content[~self._is_of_samples]
        return [part.tolist() for part in groups.split(self.counts[:, 1].tolist())]

    @cached_property
    def _is_of_samples(self) -> Tensor:
        """Whether a number of the content belongs to a sample, and not to the groups without room: bool."""
        kinds = torch.tensor([True, False]).repeat(len(self))
        return on_tokens(kinds, (self.counts[:, :2] * torch.tensor([len(KNOWN), 1])).flatten())

    def __len__(self) -> int:
        return len(self.counts)


def exchange(work: Callable[[], Window], ranks: Sequence[int]) -> Windows:
    """Work, and return the windows of all replicas, in their order; of other replicas without tokens. Collective.

    Args:
        work: the work of this rank's replica.
        ranks: one of each replica, in their order, this rank among them.

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
        gathered = all_gather(mine, ranks, torch.full((len(ranks),), len(mine))).view(len(ranks), -1)
    if gathered[:, 0].any():
        on_each_rank(partial(_raise, failure))
    counts = gathered[:, 1:]
    content = all_gather(window.content(), ranks, sizes_of(counts))
    return Windows(counts=counts, content=content, mine=window, here=ranks.index(dist.get_rank()))


def _raise(error: Exception | None) -> None:
    if error:
        raise error
