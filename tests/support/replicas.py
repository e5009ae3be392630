"""Replicas by hand: engines that draw a known number of tokens, and environments that end after three turns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Barrier, local
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from megarl.batch import Generation, Group, Prompt, Sample, float32, int32
from megarl.distributed import sharded, sums
from megarl.distributed.sharded import Shares
from megarl.environments.config import EnvironmentSection
from megarl.environments.episodes import Answer, proceed
from megarl.rollout.window import Window, Windows

THREAD = local()  # its `replica`
ONE_TOKEN = Generation(0, int32([1]), float32([-1.0]), truncated=False, weight_versions=int32([0]))


class Replicas:
    """Engines that exchange what they have, each in a thread."""

    def __init__(self, number: int) -> None:
        self.barrier, self.said = Barrier(number), dict[int, Any]()
        self.engines = [Engine(self, replica, number) for replica in range(number)]

    def exchange(self, mine: Any) -> list[Any]:
        """Return what each replica gives. Each calls it in its thread."""
        self.said[THREAD.replica] = mine
        self.barrier.wait()
        said = [self.said[engine.replica] for engine in self.engines]
        self.barrier.wait()
        return said


def merged(found: Sequence[dict[int, Group]]) -> dict[int, Group]:
    """Return groups with their tokens. Each sample has them on one replica, and is the same from afar on others."""
    assert all(list(of_replica) == list(found[0]) for of_replica in found)
    return {
        number: replace(group, samples=tuple(map(_merged, zip(*(of[number].samples for of in found), strict=True))))
        for number, group in found[0].items()
    }


def _merged(sample: Sequence[Sample]) -> Generation:
    [(home, own)] = [(replica, each) for replica, each in enumerate(sample) if isinstance(each, Generation)]
    assert all(each == own.as_remote(home) for replica, each in enumerate(sample) if replica != home)
    return own


@contextmanager
def summing(replicas: Replicas) -> Iterator[None]:
    """Let records that are spread over replicas add numbers, and bring numbers to all of them."""

    def all_reduce(tensor: Tensor) -> None:
        tensor.copy_(sum(replicas.exchange(tensor.clone())))

    world = Mock(is_initialized=lambda: True)
    with ExitStack() as stack:
        for module in (sharded, sums):
            stack.enter_context(patch.multiple(module, dist=world, all_reduce=all_reduce))
        yield


@dataclass
class Engine:
    replicas: Replicas
    replica: int
    num_replicas: int
    room: int = 64
    num_exchanges: int = 0

    @property
    def shares(self) -> Shares:
        return Shares(ranks=tuple((replica,) for replica in range(self.num_replicas)), rank=self.replica)

    def exchange(self, work: Callable[[], Window]) -> Windows:
        self.num_exchanges += 1
        THREAD.replica = self.replica
        mine = work()
        counts, contents = zip(*self.replicas.exchange((mine.counts(), mine.content())), strict=True)
        return Windows(counts=torch.tensor(counts), content=torch.cat(contents), mine=mine, here=self.replica)


@dataclass
class Queue:
    """Draws one token of the first `room` samples in a step. The responses to row `r` have `r` tokens."""

    room: int = 64
    open: list[Generation] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_running: int = 0

    def add(self, groups: list[Group]) -> None:
        self.rows += [group.prompt.index for group in groups]
        for group in groups:
            self.lengths[group.samples[0].prompt] = group.prompt.index
            self.open += [each for each in group.samples if isinstance(each, Generation) and not each.complete]

    def run(self, num_steps: int | None) -> list[Generation]:
        found, left = [], num_steps
        while self.open and left != 0:
            left = left and left - 1
            self.num_steps += 1
            self.num_running += len(self.open[: self.room])
            self.open = [*map(self._longer, self.open[: self.room]), *self.open[self.room :]]
            found += [sample for sample in self.open if sample.complete]
            self.open = [sample for sample in self.open if not sample.complete]
        return found

    def waiting(self) -> list[int]:
        started = {sample.prompt for sample in self.open if sample.token_ids}
        return [number for number in dict.fromkeys(sample.prompt for sample in self.open) if number not in started]

    def withdraw(self, groups: set[int]) -> None:
        assert groups <= set(self.waiting())
        self.rows = [row for row in self.rows if row not in {self.lengths[number] for number in groups}]
        self.open = [sample for sample in self.open if sample.prompt not in groups]

    def stop(self) -> list[Generation]:
        stopped, self.open = self.open, []
        return stopped

    def _longer(self, sample: Generation) -> Generation:
        longer = sample.then(ONE_TOKEN)
        return replace(longer, complete=len(longer.token_ids) == self.lengths[sample.prompt])


def group(row: int, *, samples: int = 1) -> Group:
    asked = Prompt(index=row, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={})
    return Group.new(asked, range(samples), started=0)


@dataclass
class Environment:
    """Ends every episode after three turns, and answers to the others with two tokens."""

    overlap: int
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # the number, sample and length of each turn

    def answer(self, said: list[Generation]) -> list[Generation]:
        self.asked += [(each.prompt, each.sample, len(each.token_ids)) for each in said]
        section, answer = EnvironmentSection(max_turns=3), Answer(reward=1.0, observation=[9, 9])
        return [proceed(each, answer, section, max_tokens=1000) for each in said]

    def with_texts(self, said: list[Generation]) -> list[Generation]:
        return said


@dataclass
class TurnQueue(Queue):
    """Ends a turn of row `r` after `r` tokens, whatever was said before."""

    asked: list[tuple[int, list[int]]] = field(default_factory=list)  # engine step, tokens of each request

    def add(self, groups: list[Group]) -> None:
        super().add(groups)
        self.asked += [(self.num_steps, sample.token_ids.tolist()) for group in groups for sample in group.samples]
        for group in groups:
            for sample in group.samples:
                self.lengths[sample.prompt] = group.prompt.index

    def _longer(self, sample: Generation) -> Generation:
        longer = sample.then(ONE_TOKEN)
        said = len(longer.token_ids) - 2 * len(longer.turns)
        return replace(longer, complete=said == self.lengths[sample.prompt] * (len(longer.turns) + 1))
