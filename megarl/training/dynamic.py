"""Dynamic sampling (Yu et al. 2025, "DAPO", section 3.2): the first prompts whose responses differ in reward.

The engine is refilled while it runs: a prompt whose responses are alike makes room for the next prompt of the data. The
step learns from the first prompts in the order of the data, and waits for the slow ones among them: what it learns from
depends neither on the speed of a replica nor on how long a response is. Prompts are counted in batches of the size that
a step learns from; the next step begins after the last batch that this step needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from megarl.algorithms.config import FilterGroupsSection
from megarl.algorithms.shaping import scores_differ
from megarl.batch import Group, Scored
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded, join_sharded
from megarl.platform.errors import UserError
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Session

Score = Callable[[list[Group]], Sharded[Scored]]
Measure = Callable[[Sharded[Scored]], Tensor]
"""The `[B]` numbers in which the responses to a prompt must differ."""


@dataclass
class GroupFilter:
    """The prompts that were scored, by their numbers in the order of the data."""

    wanted: int
    differing: dict[int, Sharded[Scored]] = field(default_factory=dict)  # one prompt each
    alike: set[int] = field(default_factory=set)
    scores: list[Tensor] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        """The number of prompts that were scored."""
        return len(self.differing) + len(self.alike)

    def chosen(self) -> list[int] | None:
        """Return the numbers of the first prompts that differ; None if further prompts may change them."""
        first = sorted(self.differing)[: self.wanted]
        if len(first) < self.wanted:
            return None
        is_settled = all(number in self.differing or number in self.alike for number in range(first[-1]))
        return first if is_settled else None

    def num_expected(self) -> int:
        """Return how many further prompts should be enough, by the share that differed so far; at most `wanted`."""
        missing = max(0, self.wanted - len(self.differing))
        if not self.num_scored:
            return missing
        return min(self.wanted, ceil(missing * self.num_scored / max(1, len(self.differing))))

    def note(self, numbers: list[int], scored: Sharded[Scored], measure: Measure) -> None:
        """Remember the prompts `numbers`, whose samples are `scored`. Collective."""
        has_score = scored.marked(scored.share.has_score())
        with_score = scored.select(has_score.nonzero()[:, 0])
        groups = with_score.index.groups
        differing = set(groups[scores_differ(measure(with_score), groups)].tolist())
        self.scores.append(with_score.gather(with_score.share.scores))
        self.differing |= {numbers[place]: scored.of_prompts([place]) for place in differing}
        self.alike |= {number for place, number in enumerate(numbers) if place not in differing}


@dataclass(eq=False)
class Queue:
    """The prompts that a step may draw, in batches in the order of the data."""

    prompts: PromptSource
    sampler: Sampler
    position: Position  # before the first batch
    step: int

    def __post_init__(self) -> None:
        self._next = 0
        self._waiting = list[Group]()
        self.positions = [self.position]  # before each batch, and after the last
        self.refill()
        self.batch_size = len(self._waiting)

    @property
    def num_batches(self) -> int:
        """The number of batches so far."""
        return len(self.positions) - 1

    def refill(self) -> None:
        """Take another batch of prompts. A prompt that comes again in this step gets other samples."""
        prompts, position = self.prompts.take(self.positions[-1])
        self._waiting += self.sampler.groups(prompts, step=self.step, batch=self.num_batches)
        self.positions.append(position)

    def take(self, count: int) -> dict[int, Group]:
        """Return the next groups, by number: at most `count`, and no more than there are."""
        taken = self._waiting[:count]
        self._waiting = self._waiting[count:]
        numbers = range(self._next, self._next + len(taken))
        self._next = numbers.stop
        return dict(zip(numbers, taken, strict=True))

    @property
    def num_waiting(self) -> int:
        """The number of prompts that no engine draws yet."""
        return len(self._waiting)


def draw_differing(
    session: Session, queue: Queue, score: Score, measure: Measure, section: FilterGroupsSection
) -> tuple[Sharded[Scored], Position, Metrics]:
    """Return a batch of prompts whose responses differ, the position after the last batch it needed, and metrics.

    Groups are scored one exchange after they became complete, so that rewards are computed while the engine runs.

    Raises:
        UserError: on all ranks alike, if this needs more batches than `section` allows, or no prompt differs.
    """
    found = GroupFilter(wanted=queue.batch_size)
    unscored = dict[int, Group]()
    while (chosen := found.chosen()) is None:
        in_flight = session.num_open + len(unscored)
        missing = max(0, found.num_expected() - in_flight)
        if missing:
            may_refill = _may_refill(queue, found, section)
            if missing > queue.num_waiting and may_refill:
                queue.refill()
            elif not queue.num_waiting and not in_flight and not may_refill:
                raise UserError(_not_enough(found, queue.num_batches, section))
            session.add(queue.take(missing))
        complete = session.advance()
        due, unscored = (unscored, complete) if session.num_open else (unscored | complete, {})
        if due:
            found.note(list(due), score(list(due.values())), measure)
    session.stop()
    num_batches = chosen[-1] // found.wanted + 1
    metrics = _metrics(found, num_batches) | {"rollout/occupancy": session.occupancy()}
    return join_sharded([found.differing[number] for number in chosen]), queue.positions[num_batches], metrics


def _may_refill(queue: Queue, found: GroupFilter, section: FilterGroupsSection) -> bool:
    """Return whether another batch may be taken: below the limit, and not after an epoch without a prompt."""
    fruitless = not found.differing and queue.positions[-1].epoch > queue.positions[0].epoch + 1
    return queue.num_batches != section.max_num_gen_batches and not fruitless


def _metrics(found: GroupFilter, num_batches: int) -> Metrics:
    return {
        "train/num_gen_batches": float(num_batches),
        "train/num_groups_kept": float(found.wanted),
        "train/num_groups_alike": float(len(found.alike)),
        "train/num_groups_surplus": float(len(found.differing) - found.wanted),
        "train/sampled_score/mean": float(torch.cat(found.scores).mean()),
    }


def _not_enough(found: GroupFilter, num_batches: int, section: FilterGroupsSection) -> str:
    return (
        f"algorithm.filter_groups found only {len(found.differing)} of {found.wanted} prompts whose responses "
        f"differ in {section.metric}, in {num_batches} batches (max_num_gen_batches={section.max_num_gen_batches}): "
        "the others are too easy or too hard for this actor. Choose other prompts, raise actor_rollout_ref.rollout.n "
        "or max_num_gen_batches (0 = no limit), or lower data.train_batch_size"
    )
