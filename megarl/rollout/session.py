"""The samples of one step, drawn by all replicas together: handed out, exchanged and stopped by counted engine steps.

A replica gets its prompts from the session, which gives each prompt to the replica with the fewest open samples. The
replicas know of each other's finished samples after `WINDOW` engine steps, and not before. So each rank decides the
same, whatever the clocks of the replicas show, and the samples of a step can be drawn again, bit for bit. An exchange
costs the time until the slowest replica has taken its steps; replicas that draw equally many samples take equally long.

A replica may have no room for some of its groups, in its slots or in its KV cache. At each exchange such groups go to
replicas with fewer open samples. A group stays together, because its samples share the keys of their prompt, and a
group with drawn tokens stays with its replica. A step whose samples all have room exchanges nothing before its end.

Tokens stay with the replica that drew them. The ranks of other replicas know a few numbers of each sample.

A sample may be an episode. The engine then stops at the end of each turn, and draws other samples while the
environment answers. The answer is taken before a window that is counted too, so a fast environment changes nothing: the
same requests reach the engine at the same step. A replica that has no other sample to draw takes its answers at once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.platform import progress
from megarl.batch import Elsewhere, Generation, Group, Sample
from megarl.distributed import watchdog
from megarl.environments.episodes import Episodes
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.replica_queue import ReplicaQueue
from megarl.rollout.window import Window

WINDOW = 16
"""Engine steps between two exchanges."""


@dataclass(frozen=True)
class Waiting:
    """An episode whose last turn has no answer yet."""

    replica: int
    window: int  # in which the turn ended
    sample: Sample


class SamplingSession:
    """The open groups of a step, by number. Every method is collective.

    Each returns the same on every rank, except that a rank has the tokens of its own replica alone.
    """

    def __init__(
        self, engine: RolloutEngine, queue: ReplicaQueue, *, num_slots: int, episodes: Episodes | None = None
    ) -> None:
        """Draw with the replicas of `engine`; this rank's replica draws from `queue`, `num_slots` samples at once.

        `episodes` None: a sample is complete if the engine has finished it.
        """
        self._engine = engine
        self._queue = queue
        self._num_slots = num_slots
        self._episodes = episodes
        self._waiting = list[Waiting]()
        self._num_windows = 0
        num_replicas = engine.num_replicas
        self._unit = f"responses of the first of {num_replicas} replicas" if num_replicas > 1 else "responses"
        self._open = dict[int, Group]()
        self._loads = [0] * engine.num_replicas  # open samples of each replica
        self._shares = engine.num_replicas > 1 and not episodes  # an episode never moves
        self._may_wait = False  # whether a replica may have groups without room
        self._most = 0  # open samples that a replica ever had
        self._num_steps = 0
        self._num_running = 0

    @property
    def num_open(self) -> int:
        """The number of groups that are not complete."""
        return len(self._open)

    def add(self, groups: dict[int, Group]) -> None:
        """Draw the incomplete samples of further groups.

        A group with tokens goes to the replica that has them, and then each other group to the replica with the fewest
        open samples.

        Raises:
            UserError: a prompt is too long.
        """
        mine = []
        homes = {number: self._home(group) for number, group in groups.items()}
        for number in sorted(groups, key=lambda number: homes[number] is None):
            home = homes[number]
            replica = self._loads.index(min(self._loads)) if home is None else home
            group = groups[number]
            self._loads[replica] += _num_open(group)
            samples = tuple(sample.of_prompt(number) for sample in group.samples)
            self._open[number] = group = replace(group, samples=samples)
            if replica == self._engine.replica:
                mine.append(group)
        self._most = max(self._most, *self._loads)
        self._may_wait |= self._shares and max(self._loads) > self._engine.room
        watchdog.note(rows=[group.prompt.index for group in mine])
        self._draw(mine)

    def advance(self, num_steps: int | None = WINDOW) -> dict[int, Group]:
        """Take engine steps, or finish all samples if `num_steps` is None. Return the groups that became complete."""
        if num_steps is None and (self._episodes or self._may_wait):
            complete = dict[int, Group]()
            while self._open:
                complete |= self.advance(WINDOW if self._episodes or self._may_wait else None)
            return complete
        if self._episodes:
            self._take_answers(self._episodes)
        windows = self._engine.exchange(lambda: self._run(num_steps))
        self._num_steps += max(window.num_steps for window in windows)
        self._num_running += sum(window.num_running for window in windows)
        for replica, window in enumerate(windows):
            if self._episodes:
                self._waiting += [Waiting(replica, self._num_windows, sample) for sample in window.finished]
            else:
                self._loads[replica] -= len(window.finished)
                self._note(window.finished)
        self._num_windows += 1
        complete = {number: group for number, group in self._open.items() if group.is_complete}
        for number in complete:
            del self._open[number]
        self._may_wait = any(window.waiting for window in windows)
        self._share([list(window.waiting) for window in windows])
        return complete

    def stop(self) -> dict[int, Group]:
        """Stop all open groups, and return them with the tokens they have, if their terms keep these.

        Turns of episodes that wait for their answers get them.
        """
        for window in self._engine.exchange(lambda: Window(self._queue.stop())):
            self._note(window.finished)
        if self._episodes and self._waiting:
            for window in self._answers(self._episodes, self._waiting):
                self._note(window.finished)
        stopped = self._open
        self._open = {}
        return stopped

    def occupancy(self) -> float:
        """Return the share of slots that drew a sample, over all engine steps and replicas.

        A step counts until the last replica has taken it. A replica has `num_slots` slots, but no more than the most
        samples that one replica had.
        """
        slots = self._num_steps * len(self._loads) * min(self._num_slots, self._most)
        return self._num_running / slots if slots else 1.0

    def _answers(self, episodes: Episodes, waiting: Sequence[Waiting]) -> list[Window]:
        """Return the episodes after the answers to their turns, by replica."""
        mine = [each.sample for each in waiting if isinstance(each.sample, Generation)]
        return self._engine.exchange(lambda: Window(episodes.answer(mine)))

    def _home(self, group: Group) -> int | None:
        """Return the replica that has tokens of the open samples of a group; None if they have none."""
        for sample in group.samples:
            if sample.num_tokens and not sample.complete:
                return sample.replica if isinstance(sample, Elsewhere) else self._engine.replica
        return None

    def _run(self, num_steps: int | None) -> Window:
        steps = self._queue.num_steps
        running = self._queue.num_running
        finished = self._queue.run(num_steps)
        return Window(
            finished,
            num_steps=self._queue.num_steps - steps,
            num_running=self._queue.num_running - running,
            waiting=self._queue.waiting() if self._shares else (),
        )

    def _share(self, waiting: Sequence[list[int]]) -> None:
        """Give groups that wait, listed by replica, to those with fewer open samples; the last of a replica first."""
        taken = list[Group]()
        given = list[Group]()
        mine = self._engine.replica
        while full := [replica for replica, groups in enumerate(waiting) if groups]:
            source = max(full, key=self._loads.__getitem__)
            target = self._loads.index(min(self._loads))
            group = self._open[waiting[source][-1]]
            size = _num_open(group)
            if self._loads[source] - self._loads[target] <= size:
                break
            waiting[source].pop()
            self._loads[source] -= size
            self._loads[target] += size
            if mine == source:
                taken.append(group)
            elif mine == target:
                given.append(group)
        if taken:
            progress.announce(-sum(map(_num_open, taken)), self._unit)
            self._queue.withdraw({group.samples[0].prompt for group in taken})
        if given:
            self._draw(given)

    def _draw(self, groups: Sequence[Group]) -> None:
        """Draw the open samples of groups with this rank's replica."""
        progress.announce(sum(map(_num_open, groups)), self._unit)
        self._queue.add(groups)

    def _take_answers(self, episodes: Episodes) -> None:
        """Take the answers that are due, and draw the next turns."""
        waiting = Counter(each.replica for each in self._waiting)
        idle = {replica for replica, load in enumerate(self._loads) if load == waiting[replica]}
        due = list[Waiting]()
        rest = list[Waiting]()
        mine = list[Group]()
        for each in self._waiting:
            is_due = each.replica in idle or each.window + episodes.overlap < self._num_windows
            (due if is_due else rest).append(each)
        if not due:
            return
        self._waiting = rest
        for replica, window in enumerate(self._answers(episodes, due)):
            self._note(window.finished)
            self._loads[replica] -= sum(sample.complete for sample in window.finished)
            if replica == self._engine.replica:
                mine = [
                    replace(self._open[sample.prompt], samples=(sample,))
                    for sample in window.finished
                    if not sample.complete
                ]
        self._draw(mine)

    def _note(self, samples: Sequence[Sample]) -> None:
        """Put samples into their groups."""
        drawn = {(sample.prompt, sample.sample): sample for sample in samples}
        for number in dict.fromkeys(sample.prompt for sample in samples):
            group = self._open[number]
            samples = tuple(drawn.get((number, sample.sample), sample) for sample in group.samples)
            self._open[number] = replace(group, samples=samples)


def _num_open(group: Group) -> int:
    return sum(not sample.complete for sample in group.samples)
