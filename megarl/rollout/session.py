"""The samples of one step, drawn by all replicas together: handed out, exchanged and stopped by counted engine steps.

A replica gets its prompts from the session, which gives each prompt to the replica with the fewest open samples. The
replicas know of each other's finished samples after `WINDOW` engine steps, and not before. So each rank decides the
same, whatever the clocks of the replicas show, and the samples of a step can be drawn again, bit for bit. An exchange
costs the time until the slowest replica has taken its steps; replicas that draw equally many samples take equally long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.platform import progress
from megarl.batch import Generation, Group
from megarl.distributed import watchdog
from megarl.rollout.drawing import Drawing
from megarl.rollout.engine import RolloutEngine

WINDOW = 16
"""Engine steps between two exchanges."""


@dataclass(frozen=True)
class Window:
    """The work of one replica between two exchanges."""

    finished: list[Generation]
    num_steps: int
    num_running: int  # samples that were drawn at once, summed over the steps


class Session:
    """The open groups of a step, by number. Every method is collective, and returns the same on every rank."""

    def __init__(self, engine: RolloutEngine, drawing: Drawing, *, num_slots: int) -> None:
        """Draw with the replicas of `engine`; this rank's replica draws with `drawing`, `num_slots` samples at once."""
        self._engine, self._drawing, self._num_slots = engine, drawing, num_slots
        num_replicas = engine.num_replicas
        self._unit = f"responses of the first of {num_replicas} replicas" if num_replicas > 1 else "responses"
        self._open = dict[int, Group]()
        self._loads = [0] * engine.num_replicas  # open samples of each replica
        self._most = 0  # open samples that a replica ever had
        self._num_steps, self._num_running = 0, 0

    @property
    def num_open(self) -> int:
        """The number of groups that are not complete."""
        return len(self._open)

    def add(self, groups: dict[int, Group]) -> None:
        """Draw the incomplete samples of further groups. Each group goes to the replica with the fewest open samples.

        Raises:
            ValueError: a prompt is too long.
        """
        mine = []
        for number, group in groups.items():
            replica = self._loads.index(min(self._loads))
            self._loads[replica] += sum(not sample.complete for sample in group.samples)
            samples = tuple(replace(sample, prompt=number) for sample in group.samples)
            self._open[number] = group = replace(group, samples=samples)
            if replica == self._engine.replica:
                mine.append(group)
        self._most = max(self._most, *self._loads)
        watchdog.note(rows=[group.prompt.index for group in mine])
        progress.announce(sum(not sample.complete for group in mine for sample in group.samples), self._unit)
        self._drawing.add(mine)

    def advance(self, num_steps: int | None = WINDOW) -> dict[int, Group]:
        """Take engine steps, or finish all samples if `num_steps` is None. Return the groups that became complete."""
        windows = self._engine.on_all_ranks(lambda: self._run(num_steps))
        self._num_steps += max(window.num_steps for window in windows)
        self._num_running += sum(window.num_running for window in windows)
        for replica, window in enumerate(windows):
            self._loads[replica] -= len(window.finished)
            self._note(window.finished)
        complete = {number: group for number, group in self._open.items() if group.is_complete}
        for number in complete:
            del self._open[number]
        return complete

    def stop(self) -> dict[int, Group]:
        """Stop all open groups, and return them with the tokens they have, if their terms keep these."""
        for generations in self._engine.on_all_ranks(self._drawing.stop):
            self._note(generations)
        stopped, self._open = self._open, {}
        return stopped

    def occupancy(self) -> float:
        """Return the share of slots that drew a sample, over all engine steps and replicas.

        A step counts until the last replica has taken it. A replica has `num_slots` slots, but no more than the most
        samples that one replica had.
        """
        slots = self._num_steps * len(self._loads) * min(self._num_slots, self._most)
        return self._num_running / slots if slots else 1.0

    def _run(self, num_steps: int | None) -> Window:
        steps, running = self._drawing.num_steps, self._drawing.num_running
        finished = self._drawing.run(num_steps)
        return Window(finished, self._drawing.num_steps - steps, self._drawing.num_running - running)

    def _note(self, generations: Sequence[Generation]) -> None:
        """Put samples into their groups."""
        drawn = {(generation.prompt, generation.sample): generation for generation in generations}
        for number in dict.fromkeys(generation.prompt for generation in generations):
            group = self._open[number]
            samples = tuple(drawn.get((number, sample.sample), sample) for sample in group.samples)
            self._open[number] = replace(group, samples=samples)
