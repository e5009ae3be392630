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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.platform import progress
from megarl.batch import Generation, Group
from megarl.columns import Integers
from megarl.distributed import watchdog
from megarl.distributed.evenly import deal
from megarl.distributed.made_prompts import redistribute_prompts
from megarl.environments.episodes import Episodes
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.open_groups import OpenGroups
from megarl.rollout.replica_queue import ReplicaQueue
from megarl.rollout.table import ROW, GroupRows
from megarl.rollout.window import Window

WINDOW = 16
"""Engine steps between two exchanges."""
Keep = Callable[[Mapping[int, Group]], None]


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
        self._waiting = Counter[tuple[int, int]]()  # turns without an answer, by their replica and window
        self._own_waiting = list[tuple[int, Generation]]()  # turns of this replica, with their windows
        self._num_windows = 0
        num_replicas = engine.num_replicas
        self._unit = f"responses of the first of {num_replicas} replicas" if num_replicas > 1 else "responses"
        self._groups = OpenGroups()
        self._loads = np.zeros(engine.num_replicas, dtype=np.int64)  # open samples of each replica
        self._shares = engine.num_replicas > 1 and not episodes  # an episode never moves
        self._may_wait = False  # whether a replica may have groups without room
        self._most = 0  # open samples that a replica ever had
        self._num_steps = 0
        self._num_running = 0

    @property
    def num_open(self) -> int:
        """The number of groups that are not complete."""
        return self._groups.num_open

    def add(self, groups: Mapping[int, Group]) -> None:
        """Draw the incomplete samples of further groups.

        A group with tokens goes to the replica that has them, and then each other group to the replica with the fewest
        open samples.

        Raises:
            UserError: a prompt is too long.
        """
        self._add(np.array([*groups], dtype=np.int64), GroupRows.of([*groups.values()]))

    def draw(self, groups: Sequence[Group], keep: Keep | None = None) -> GroupRows:
        """Draw all samples of the groups of a session that has no others, and return the groups. Raises as `add`.

        `keep` receives the groups of this rank's replica that became complete, by number, after each window.
        """
        self._add(np.arange(len(groups)), GroupRows.of(groups))
        while self.num_open:
            complete = self._advance(WINDOW if self._episodes or self._may_wait or keep else None)
            if keep:
                keep({number: self._groups.group(number) for number in complete if self._groups.is_here(number)})
        return self._groups.everything()

    def advance(self, num_steps: int | None = WINDOW) -> dict[int, Group]:
        """Take engine steps, or finish all samples if `num_steps` is None. Return the groups that became complete."""
        if num_steps is None and (self._episodes or self._may_wait):
            complete = dict[int, Group]()
            while self.num_open:
                complete |= self.advance(WINDOW if self._episodes or self._may_wait else None)
            return complete
        return {number: self._groups.group(number) for number in self._advance(num_steps)}

    def stop(self) -> dict[int, Group]:
        """Stop all open groups, and return them with the tokens they have, if their terms keep these.

        Turns of episodes that wait for their answers get them.
        """
        episodes = self._episodes
        if episodes is None:
            self._groups.note(self._engine.exchange(lambda: Window(self._queue.stop())))
        else:
            self._groups.note(self._engine.exchange(lambda: Window(episodes.with_texts(self._queue.stop()))))
            if self._waiting:
                asked = [sample for _, sample in self._own_waiting]
                self._groups.note(self._engine.exchange(lambda: Window(episodes.with_texts(episodes.answer(asked)))))
        return {number: self._groups.group(number) for number in self._groups.take_all()}

    def occupancy(self) -> float:
        """Return the share of slots that drew a sample, over all engine steps and replicas.

        A step counts until the last replica has taken it. A replica has `num_slots` slots, but no more than the most
        samples that one replica had.
        """
        slots = self._num_steps * len(self._loads) * min(self._num_slots, self._most)
        return self._num_running / slots if slots else 1.0

    def _add(self, numbers: Integers, groups: GroupRows) -> None:
        sizes = groups.num_incomplete()
        replicas = groups.replicas(self._engine.replica)
        has_home = replicas >= 0
        np.add.at(self._loads, replicas[has_home], sizes[has_home])
        replicas[~has_home] = deal(self._loads, sizes[~has_home])
        np.add.at(self._loads, replicas[~has_home], sizes[~has_home])
        places = torch.arange(len(groups))
        prompts = redistribute_prompts(groups.prompts, places, torch.from_numpy(replicas), self._engine.shares.ranks)
        self._groups.add(numbers, replace(groups, prompts=prompts))
        self._most = max(self._most, int(self._loads.max()))
        self._may_wait |= self._shares and int(self._loads.max()) > self._engine.room
        order = np.argsort(~has_home, kind="stable")
        mine = [
            self._groups.group(number) for number in numbers[order][replicas[order] == self._engine.replica].tolist()
        ]
        watchdog.note(rows=[group.prompt.index for group in mine])
        self._draw(mine)

    def _advance(self, num_steps: int | None) -> list[int]:
        """Take engine steps, or finish all samples that have room. Return the groups that became complete."""
        if self._episodes:
            self._take_answers(self._episodes)
        windows = self._engine.exchange(lambda: self._run(num_steps))
        num_finished, _, steps, running = windows.counts.T
        self._num_steps += int(steps.max())
        self._num_running += int(running.sum())
        if self._episodes:
            turns = {
                (replica, self._num_windows): count for replica, count in enumerate(num_finished.tolist()) if count
            }
            self._waiting.update(turns)
            own = (each for each in windows.mine.finished if isinstance(each, Generation))
            self._own_waiting += [(self._num_windows, each) for each in own]
        else:
            self._loads -= num_finished.numpy()
            self._groups.note(windows)
        self._num_windows += 1
        complete = self._groups.take_complete()
        waiting = windows.waiting
        self._may_wait = any(waiting)
        self._share(waiting)
        return complete

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
        while any(waiting):
            full = [replica for replica, groups in enumerate(waiting) if groups]
            source = full[int(self._loads[full].argmax())]
            target = int(self._loads.argmin())
            number = waiting[source][-1]
            size = self._groups.num_left(number)
            if self._loads[source] - self._loads[target] <= size:
                break
            waiting[source].pop()
            self._loads[source] -= size
            self._loads[target] += size
            if mine == source:
                taken.append(self._groups.group(number))
            elif mine == target:
                given.append(self._groups.group(number))
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
        num_waiting = np.zeros_like(self._loads)
        for (replica, _), count in self._waiting.items():
            num_waiting[replica] += count
        is_idle = self._loads == num_waiting
        due = {
            (replica, window)
            for replica, window in self._waiting
            if is_idle[replica] or window + episodes.overlap < self._num_windows
        }
        if not due:
            return
        here = self._engine.replica
        asked = [sample for window, sample in self._own_waiting if (here, window) in due]
        self._own_waiting = [each for each in self._own_waiting if (here, each[0]) not in due]
        for key in due:
            del self._waiting[key]
        windows = self._engine.exchange(lambda: Window(episodes.answer(asked)))
        self._groups.note(windows)
        replicas = np.repeat(np.arange(len(windows)), windows.counts[:, 0])
        np.subtract.at(self._loads, replicas[windows.finished[ROW["complete"]].numpy() > 0], 1)
        mine = [
            replace(self._groups.group(sample.prompt), samples=(sample,))
            for sample in windows.mine.finished
            if not sample.complete
        ]
        self._draw(mine)


def _num_open(group: Group) -> int:
    return sum(not sample.complete for sample in group.samples)
