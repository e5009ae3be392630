"""Partial rollouts counted in engine steps, without an engine, for docs/benchmarks/generation.md.

    python scripts/occupancy.py [--picture docs/images/occupancy.svg]

The code of a run decides (`megarl.training.partial`). The responses are numbers of tokens: geometric with mean 150, at
most 1,024, 32 prompts with 4 responses each.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib import pyplot as plt

from megarl.batch import Generation, Group, Prompt, Prompts, Sample, int32
from megarl.data.order import Position
from megarl.distributed.sharded import Shares
from megarl.rollout.config import PartialSection
from megarl.rollout.responses import of_groups
from megarl.rollout.session import WINDOW
from megarl.training.partial import Partial, draw_enough, staleness

mpl.use("svg")
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.size": 9}
ROOT = Path(__file__).resolve().parent.parent
MEAN = 150
LONGEST = 1024
PROMPTS = 32
RESPONSES = 4
STEPS, SETTLED = 60, 15  # steps in all, and those before the first that counts
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
ENGINE_STEPS = (512, 384, 256, 192, 128)


@dataclass(frozen=True)
class Count:
    """Means over the steps of a run."""

    engine_steps: float
    occupancy: float
    updates: float  # that a prompt lives through
    staleness: float  # of a token
    learnt: float  # prompts of a step


class World:
    """Endless prompts, and an engine that draws a token of every open sample in each engine step."""

    def __init__(self) -> None:
        self.step = self.num_steps = self.num_running = self.most = 0
        self._open = dict[int, Group]()

    def take(self, position: Position, count: int) -> tuple[Prompts, Position]:
        """Return the next prompts."""
        rows = range(position.offset, position.offset + count)
        prompts = [
            Prompt(index=row, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={}) for row in rows
        ]
        return Prompts(prompts=prompts), Position(0, rows.stop)

    def groups(self, prompts: Prompts, *, step: int) -> list[Group]:
        """Return new groups."""
        return [Group.new(prompt, range(RESPONSES), started=step) for prompt in prompts.prompts]

    def open(self, *, step: int, keeps_stopped: bool) -> "World":
        """Begin a step."""
        self.step = step
        self.num_steps = 0
        self.num_running = 0
        self.most = 0
        return self

    @property
    def num_open(self) -> int:
        """The number of groups that are not complete."""
        return len(self._open)

    def add(self, groups: dict[int, Group]) -> None:
        """Draw further groups."""
        self._open |= groups
        self.most += sum(not sample.complete for group in groups.values() for sample in group.samples)

    def advance(self) -> dict[int, Group]:
        """Take the engine steps until the next exchange, fewer if nothing is left."""
        left = [
            length_of(group.prompt.index, sample.sample) - sample.num_tokens
            for group in self._open.values()
            for sample in group.samples
        ]
        self.num_steps += min(WINDOW, max(left))
        self.num_running += sum(min(WINDOW, max(tokens, 0)) for tokens in left)
        self._open = {number: self._longer(group) for number, group in self._open.items()}
        complete = {number: group for number, group in self._open.items() if group.is_complete}
        self._open = {number: group for number, group in self._open.items() if number not in complete}
        return complete

    def stop(self) -> dict[int, Group]:
        """Stop what is not complete."""
        stopped = self._open
        self._open = {}
        return stopped

    def occupancy(self) -> float:
        """Return the share of the slots that drew a sample."""
        return self.num_running / (self.num_steps * self.most) if self.num_steps else 1.0

    def _longer(self, group: Group) -> Group:
        def longer(sample: Sample) -> Generation:
            assert isinstance(sample, Generation), "there is one replica"
            length = length_of(group.prompt.index, sample.sample)
            drawn = min(WINDOW, length - len(sample.token_ids))
            return replace(
                sample,
                token_ids=sample.token_ids + int32([1]) * drawn,
                weight_versions=sample.weight_versions + int32([self.step]) * drawn,
                complete=len(sample.token_ids) + drawn == length,
            )

        return replace(group, samples=tuple(map(longer, group.samples)))


@cache
def length_of(row: int, sample: int) -> int:
    """Return the number of tokens of a response."""
    return min(LONGEST, 1 + int(random.Random(1000 * row + sample).expovariate(1.0 / MEAN)))


def count(stop_when: float, max_staleness: int = 20) -> Count:
    """Run the steps, and count. `stop_when: 1.0` is waiting."""
    world = World()
    position = Position()
    in_flight = tuple[Group, ...]()
    section = PartialSection(enable=True, stop_when=stop_when, max_staleness=max_staleness)
    partial = Partial(wanted=PROMPTS, num_samples=RESPONSES, section=section)
    engine_steps = list[int]()
    occupancy = list[float]()
    lives = list[int]()
    ages = list[float]()
    learnt = list[int]()
    for step in range(STEPS):
        drawn = draw_enough(partial, world, world, in_flight, position, step=step)  # type: ignore[arg-type]
        in_flight = drawn.in_flight
        position = drawn.position
        if step >= SETTLED:
            engine_steps.append(world.num_steps)
            occupancy.append(world.occupancy())
            lives += [step - group.started for group in drawn.chosen]
            ages.append(staleness(of_groups(drawn.chosen, Shares()), step=step)["rollout/staleness/mean"])
            learnt.append(len(drawn.chosen))
    return Count(fmean(engine_steps), fmean(occupancy), fmean(lives), fmean(ages), fmean(learnt))


def law(num_steps: Sequence[int], num_prompts: int = 2000) -> tuple[list[float], list[float]]:
    """Return the updates that a prompt lives through, and the occupancy, for steps of so many engine steps."""
    lengths = [[length_of(row, sample) for sample in range(RESPONSES)] for row in range(num_prompts)]
    flat = [length for of_prompt in lengths for length in of_prompt]
    updates = [fmean(ceil(max(of_prompt) / steps) for of_prompt in lengths) - 1.0 for steps in num_steps]
    occupancy = [fmean(flat) / (steps * fmean(ceil(length / steps) for length in flat)) for steps in num_steps]
    return updates, occupancy


def draw(picture: Path, counts: dict[float, Count]) -> None:
    """Draw the law as a curve, and the counts as points."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(*law(range(100, LONGEST, 4)), color="#8a8f98", label="the law")
    sides = {"ha": "right", "va": "bottom"}, {"ha": "left", "va": "top"}
    asked_for = ("a share", SHARES), ("a number of engine steps", ENGINE_STEPS)
    for (name, asked), side in zip(asked_for, sides, strict=True):
        points = [(counts[value].updates, counts[value].occupancy) for value in asked]
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="", label=f"counted: {name}")
        for value, point in zip(asked, points, strict=True):
            axes.annotate(f" {value:g} ", point, fontsize=7, **side)
    axes.plot(0.0, counts[1.0].occupancy, marker="s", linestyle="", color="#22262d", label="counted: waiting")
    axes.set(xlabel="updates that a prompt lives through", ylabel="occupancy", ylim=(0, 0.8))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    """Count, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "occupancy.svg")
    options = parser.parse_args()
    counts = {asked: count(asked) for asked in (1.0, *SHARES, *ENGINE_STEPS)}
    for asked, found in counts.items():
        print(
            f"stop_when {asked}: {found.engine_steps:.0f} engine steps, occupancy {found.occupancy:.2f}, "
            f"{found.updates:.2f} updates, staleness {found.staleness:.2f}, {found.learnt:.1f} prompts"
        )
    draw(options.picture, counts)


if __name__ == "__main__":
    main()
