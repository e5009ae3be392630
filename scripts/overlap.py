"""Slow environments counted in engine steps, without an engine: the numbers of docs/benchmarks/generation.md.

    python scripts/overlap.py [--engine-step 0.02] [--longest 2]

The code of a run decides when answers are taken (`megarl.rollout.session`). A clock by hand counts the seconds: an
engine step takes `--engine-step`, and a turn of an environment takes up to `--longest`, evenly distributed. The engine
draws 32 of 128 episodes of three turns at once; a turn has geometrically many tokens, 75 on average.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from megarl.batch import Generation, Group, Prompt, int32
from megarl.environments.config import EnvironmentSection
from megarl.environments.episodes import Answer, proceed
from megarl.rollout.session import WINDOW, SamplingSession
from megarl.rollout.window import Window, Windows

EPISODES = 128
SLOTS = 32
TURNS = 3
MEAN = 75
OVERLAPS = (0, 1, 2, 4, 8, 16)


@dataclass
class World:
    """One replica and its environments, on one clock."""

    engine_step: float  # seconds
    longest: float  # seconds of a turn of an environment
    overlap: int
    replica: int = 0
    num_replicas: int = 1
    num_steps: int = 0
    num_running: int = 0
    clock: float = 0.0
    waited: float = 0.0  # seconds
    _open: list[tuple[Generation, int]] = field(default_factory=list)  # the tokens that are left
    _ready: dict[tuple[int, int], float] = field(default_factory=dict)  # when a turn has its answer

    def exchange(self, work: Callable[[], Window]) -> Windows:
        """Return the window of the only replica."""
        window = work()
        return Windows(counts=torch.tensor([window.counts()]), content=window.content(), mine=window, here=0)

    def add(self, groups: Sequence[Group]) -> None:
        """Draw a turn of each sample. The engine takes those that came first."""
        for group in groups:
            for sample in group.samples:
                assert isinstance(sample, Generation), "there is one replica"
                length = 1 + int(_random("tokens", sample).expovariate(1.0 / MEAN))
                self._open.append((sample, length))

    def run(self, num_steps: int) -> list[Generation]:
        """Take engine steps, and ask about the turns that end."""
        ended = list[Generation]()
        for _ in range(num_steps if self._open else 0):
            self.num_steps += 1
            self.num_running += min(SLOTS, len(self._open))
            self.clock += self.engine_step
            drawn = [(_longer(sample), left - 1) for sample, left in self._open[:SLOTS]]
            done = [sample for sample, left in drawn if not left]
            for sample in done:
                seconds = _random("answer", sample).uniform(0.0, self.longest)
                self._ready[sample.prompt, len(sample.turns)] = self.clock + seconds
            self._open = [each for each in drawn if each[1]] + self._open[SLOTS:]
            ended += done
            if not self._open:
                break
        return ended

    def answer(self, said: Sequence[Generation]) -> list[Generation]:
        """Wait for the answers to these turns."""
        ready = max(self._ready[each.prompt, len(each.turns)] for each in said)
        self.waited += max(0.0, ready - self.clock)
        self.clock = max(self.clock, ready)
        section = EnvironmentSection(max_turns=TURNS)
        return [proceed(each, Answer(observation=[1, 1, 1]), section, max_tokens=1 << 30) for each in said]


def _random(of: str, sample: Generation) -> random.Random:
    return random.Random(f"{of} {sample.prompt} {len(sample.turns)}")


def _longer(sample: Generation) -> Generation:
    return replace(
        sample,
        token_ids=sample.token_ids + int32([1]),
        weight_versions=sample.weight_versions + int32([0]),
        complete=True,
    )


def play(engine_step: float, longest: float, overlap: int) -> tuple[World, float]:
    """Play all episodes. Return the world at the end, and the occupancy."""
    world = World(engine_step, longest, overlap)
    session = SamplingSession(world, world, num_slots=SLOTS, episodes=world)  # type: ignore[arg-type]
    prompts = [
        Prompt(index=row, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={})
        for row in range(EPISODES)
    ]
    session.add({prompt.index: Group.new(prompt, [0], started=0) for prompt in prompts})
    session.advance(None)
    return world, session.occupancy()


def main() -> None:
    """Play with each overlap, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-step", type=float, default=0.02, help="seconds (default: %(default)s)")
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of a turn (default: %(default)s)")
    options = parser.parse_args()
    least = play(options.engine_step, 0.0, 1)[0].clock
    print("| `overlap` | occupancy | the engine waits | times as long as with answers at once |\n|---|---|---|---|")
    for overlap in OVERLAPS:
        world, occupancy = play(options.engine_step, options.longest, overlap)
        print(f"| {overlap} | {occupancy:.2f} | {world.waited / world.clock:.0%} | {world.clock / least:.2f} |")
    print(f"\nA window of {WINDOW} engine steps takes {WINDOW * options.engine_step:.2f} s.")


if __name__ == "__main__":
    main()
