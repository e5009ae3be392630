"""Partial rollouts by hand: what a step learns from, what continues, how old its tokens are, and what a file keeps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from megarl.batch import Generation, Group, Prompt, Prompts, Sample, StopReason, Turn, float32, int32
from megarl.data.order import Position
from megarl.distributed.sharded import Shares
from megarl.platform.small_files import Damage
from megarl.rollout.config import PartialSection
from megarl.rollout.responses import of_groups
from megarl.rollout.session import WINDOW
from megarl.samples.in_flight import IN_FLIGHT_FILES, InFlight, rows_of, to_bytes
from megarl.training.partial import Drawn, Partial, draw_enough, staleness
from tests.support.programs import run_python
from tests.support.ranks import world_of_one

NUM_SAMPLES = 2
PEAK = """
import os, sys, tracemalloc
from pathlib import Path
from megarl.samples.in_flight import rows_of
rows_of(Path(sys.argv[1]))  # imports what it needs
tracemalloc.start()
rows = rows_of(Path(sys.argv[1]))
print(tracemalloc.get_traced_memory()[1], flush=True)
os._exit(0)  # tracemalloc must not end while a thread of Arrow may still release a buffer
"""


def prompt(row: int) -> Prompt:
    return Prompt(index=row, token_ids=[row, row + 1], text="", data_source="", ground_truth=None, extra_info={})


class World:
    """Endless prompts, and an engine that draws a token of every open sample between two exchanges.

    The responses to row `r` have `length_of(r)` tokens: `100 r`, `100 r + 1`, ...
    """

    def __init__(self, length_of: Callable[[int], int]) -> None:
        self.length_of, self.step, self.num_exchanges = length_of, 0, 0
        self._open = dict[int, Group]()

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        assert count is not None
        rows = range(position.offset, position.offset + count)
        return Prompts(prompts=[prompt(row) for row in rows]), Position(0, rows.stop)

    def groups(self, prompts: Prompts, *, step: int, batch: int = 0) -> list[Group]:
        return [Group.new(each, range(NUM_SAMPLES), started=step) for each in prompts.prompts]

    def open(self, *, step: int, keeps_stopped: bool = False) -> "World":
        assert keeps_stopped
        assert not self._open, "the engine stopped everything before it went to sleep"
        self.step, self.num_exchanges = step, 0
        return self

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, groups: dict[int, Group]) -> None:
        assert all(not group.is_complete for group in groups.values())
        self._open |= groups

    def advance(self) -> dict[int, Group]:
        assert self._open, "there is nothing to wait for"
        self.num_exchanges += 1
        self._open = {number: self._longer(group) for number, group in self._open.items()}
        complete = {number: group for number, group in self._open.items() if group.is_complete}
        self._open = {number: group for number, group in self._open.items() if number not in complete}
        return complete

    def stop(self) -> dict[int, Group]:
        stopped, self._open = self._open, {}
        return stopped

    def occupancy(self) -> float:
        return 0.5

    def _longer(self, group: Group) -> Group:
        row = group.prompt.index

        def longer(sample: Sample) -> Generation:
            assert isinstance(sample, Generation)
            number = len(sample.token_ids)
            token, version = int32([100 * row + number]), int32([self.step])
            drawn = Generation(0, token, float32([-1.0]), truncated=False, weight_versions=version)
            return replace(sample.then(drawn), complete=number + 1 == self.length_of(row))

        return replace(group, samples=tuple(map(longer, group.samples)))


def run(world: World, steps: int, *, wanted: int, **section: float) -> list[tuple[Drawn, int]]:
    """Return what each step draws, and how many exchanges it took."""
    partial = Partial(wanted=wanted, num_samples=NUM_SAMPLES, section=PartialSection(enable=True, **section))  # type: ignore[arg-type]
    found, in_flight, position = list[tuple[Drawn, int]](), tuple[Group, ...](), Position()
    for step in range(steps):
        drawn = draw_enough(partial, world, world, in_flight, position, step=step)  # type: ignore[arg-type]
        in_flight, position = drawn.in_flight, drawn.position
        found.append((drawn, world.num_exchanges))
    return found


def rows(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def test_three_steps_by_hand() -> None:
    """Four prompts are drawn and two are learnt. Row 1 takes 5 exchanges, row 3 takes 9, row 2 two, and others one."""
    world = World(lambda row: {1: 5, 2: 2, 3: 9}.get(row, 1))
    found = run(world, 4, wanted=2, stop_when=0.5, max_staleness=2)
    assert [rows(drawn.chosen) for drawn, _ in found] == [[0, 2], [4, 5], [1, 3], [6, 7]]
    assert [rows(drawn.in_flight) for drawn, _ in found] == [[1, 3], [1, 3], [6, 7], [8, 9]]
    assert [num_exchanges for _, num_exchanges in found] == [2, 1, 6, 0]  # step 2 waits; 6 and 7 are then complete
    assert [drawn.position.offset for drawn, _ in found] == [4, 6, 8, 10]
    assert [drawn.metrics["rollout/carried_share"] for drawn, _ in found] == [0.5] * 4
    assert [drawn.metrics["rollout/recomputed_tokens"] for drawn, _ in found] == [0.0, 8.0, 12.0, 0.0]

    one, three = found[2][0].chosen
    assert one.samples[0].token_ids == int32([100, 101, 102, 103, 104])
    assert one.samples[0].weight_versions == int32([0, 0, 1, 2, 2])
    assert three.samples[1].weight_versions == int32([0, 0, 1, 2, 2, 2, 2, 2, 2])
    assert three.samples[1].log_probs == float32([-1.0] * 9)
    ages = staleness(of_groups([one, three], Shares()), step=2)
    assert ages == {"rollout/staleness/mean": pytest.approx(10 / 14), "rollout/staleness/max": 2.0}


def test_steps_of_counted_engine_steps_by_hand() -> None:
    """Three prompts are drawn for two exchanges. Row 1 takes 5, row 3 and row 4 take 9, and others take one."""
    world = World(lambda row: {1: 5, 3: 9, 4: 9}.get(row, 1))
    found = run(world, 6, wanted=3, stop_when=WINDOW + 1, max_staleness=4)
    assert [rows(drawn.chosen) for drawn, _ in found] == [[0, 2], [1], [5], [6], [3, 4, 7], [8, 9, 10]]
    assert [num_exchanges for _, num_exchanges in found] == [2, 3, 2, 2, 2, 1]  # step 1 waits for its first prompt
    assert [drawn.metrics["rollout/complete_prompts"] for drawn, _ in found] == [2.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    assert [drawn.position.offset for drawn, _ in found] == [3, 5, 6, 7, 8, 11]


def test_counted_engine_steps_wait_for_old_prompts() -> None:
    found = run(World(lambda row: {1: 6}.get(row, 2)), 2, wanted=2, stop_when=2 * WINDOW, max_staleness=1)
    assert [rows(drawn.chosen) for drawn, _ in found] == [[0], [1, 2]]
    assert [num_exchanges for _, num_exchanges in found] == [2, 4]


def test_the_law_of_counted_engine_steps() -> None:
    """A prompt whose longest response takes T exchanges is in the engine for T / 4 steps, rounded up."""
    draw = random.Random(5)
    lengths = [draw.choice([1, 2, 3, 5, 9, 14]) for _ in range(4000)]
    found = [drawn for drawn, _ in run(World(lengths.__getitem__), 200, wanted=20, stop_when=4 * WINDOW)]
    mean_steps = sum(ceil(length / 4) for length in (1, 2, 3, 5, 9, 14)) / 6
    learnt = [drawn.metrics["rollout/complete_prompts"] for drawn in found[20:]]
    assert sum(learnt) / len(learnt) == pytest.approx(20 / mean_steps, rel=0.03)
    lives = [step - group.started for step, drawn in enumerate(found) for group in drawn.chosen if step >= 20]
    assert sum(lives) / len(lives) == pytest.approx(mean_steps - 1, rel=0.05)


@pytest.mark.parametrize("stop_when", [0.5, 0.7, 0.8, 6 * WINDOW])
def test_every_prompt_is_trained_once_within_staleness_limit(stop_when: float) -> None:
    draw = random.Random(3)
    lengths = [draw.choice([1, 2, 3, 3, 4, 30]) for _ in range(1000)]
    found = run(World(lengths.__getitem__), 40, wanted=5, stop_when=stop_when, max_staleness=3)
    learnt = [row for drawn, _ in found for row in rows(drawn.chosen)]
    assert all(len(drawn.chosen) == 5 or stop_when > 1 and drawn.chosen for drawn, _ in found)
    assert len(learnt) == len({*learnt})
    last, _ = found[-1]
    assert {*learnt} | {*rows(last.in_flight)} == {*range(last.position.offset)}, "no prompt is lost"
    ages = [
        staleness(of_groups(drawn.chosen, Shares()), step=step)["rollout/staleness/max"]
        for step, (drawn, _) in enumerate(found)
    ]
    assert max(ages) == 3.0
    assert sum(drawn.metrics["rollout/wasted_tokens"] for drawn, _ in found) == 0.0
    assert all(
        lengths[group.prompt.index] == len(group.samples[0].token_ids) for drawn, _ in found for group in drawn.chosen
    )


def test_a_long_tail_takes_fewer_engine_steps() -> None:
    """One prompt of 16 has responses of eight times the usual length. Waiting takes 24 engine steps for each step."""
    lengths = [24 if row % 16 == 5 else 3 for row in range(1000)]

    def engine_steps(stop_when: float, max_staleness: int) -> int:
        found = run(World(lengths.__getitem__), 30, wanted=16, stop_when=stop_when, max_staleness=max_staleness)
        return sum(num_exchanges for _, num_exchanges in found[10:])

    assert engine_steps(1.0, 1) == 20 * 24
    assert engine_steps(0.8, 1) <= 20 * 24 / 1.4
    assert engine_steps(0.8, 8) <= 20 * 24 / 5


def test_step_ending_with_all_prompts_carries_nothing_over() -> None:
    found = run(World(lambda row: 1 + row % 7), 3, wanted=4, stop_when=1.0, max_staleness=1)
    assert [rows(drawn.chosen) for drawn, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(drawn.in_flight == () for drawn, _ in found)


def test_groups_beyond_staleness_limit_restart() -> None:
    world = World(lambda row: 6)
    partial = Partial(
        wanted=1, num_samples=NUM_SAMPLES, section=PartialSection(enable=True, stop_when=0.5, max_staleness=1)
    )
    tokens = Generation(0, int32([7, 8]), float32([-1.0, -2.0]), truncated=False, sample=0, complete=False)
    tokens = replace(tokens, weight_versions=int32([1, 1]))
    old = Group(prompt=prompt(50), samples=(tokens, replace(tokens, sample=1)), started=1)
    drawn = draw_enough(partial, world, world, [old], Position(), step=4)  # type: ignore[arg-type]
    [group] = drawn.chosen
    assert (group.prompt.index, group.started) == (50, 4)
    assert group.samples[1].weight_versions == int32([4] * 6)
    assert group.samples[1].sample == 1
    assert drawn.metrics["rollout/wasted_tokens"] == 4.0


@pytest.mark.parametrize("num_samples", [1, 4])
def test_groups_of_another_size_restart(num_samples: int) -> None:
    world = World(lambda row: 6)
    section = PartialSection(enable=True, stop_when=0.5, max_staleness=1)
    partial = Partial(wanted=1, num_samples=num_samples, section=section)
    [carried, *_] = carried_groups()
    assert carried.num_tokens and len(carried.samples) == NUM_SAMPLES
    drawn = draw_enough(partial, world, world, [carried], Position(), step=carried.started)  # type: ignore[arg-type]
    [group] = drawn.chosen
    assert group.prompt == carried.prompt
    assert [sample.sample for sample in group.samples] == list(range(num_samples))
    assert drawn.metrics["rollout/wasted_tokens"] == carried.num_tokens


def carried_groups() -> tuple[Group, ...]:
    found = run(World(lambda row: {1: 5, 3: 9}.get(row, 2)), 2, wanted=2, stop_when=0.5, max_staleness=2)
    groups = found[-1][0].in_flight
    first = groups[0].samples[0]
    assert isinstance(first, Generation)
    return (*groups, replace(groups[0], samples=(replace(first, log_probs=None),)))


def kept(
    directory: Path, groups: tuple[Group, ...], opened: Callable[[Prompts], Prompts] | None = None
) -> tuple[Group, ...]:
    """Write groups as a checkpoint keeps them, and return what a run finds."""
    for name, content in InFlight(groups).files().items():
        (directory / name).write_bytes(content)
    return found(directory, opened=opened)


def found(
    directory: Path, prompt_of: Callable[[int], Prompt] = prompt, opened: Callable[[Prompts], Prompts] | None = None
) -> tuple[Group, ...]:
    with world_of_one():
        return InFlight.read(sorted(directory.glob(IN_FLIGHT_FILES)), Shares(), prompt_of, opened).groups


def test_a_file_keeps_every_group(tmp_path: Path) -> None:
    groups = carried_groups()
    assert any(sample.token_ids for group in groups for sample in group.samples)
    assert kept(tmp_path, groups) == groups


def test_files_of_two_replicas_keep_every_group(tmp_path: Path) -> None:
    """The second samples of the groups are drawn by the second replica, except for those that have no tokens."""
    groups = (*carried_groups()[:2], Group.new(prompt(7), range(NUM_SAMPLES), started=1))
    for replica in range(2):
        seen = [
            tuple(each if each.sample == replica else each.as_remote(1 - replica) for each in group.samples)
            for group in groups
        ]
        known = tuple(replace(group, samples=samples) for group, samples in zip(groups, seen, strict=True))
        [(name, content)] = InFlight(known, Shares(ranks=((0,), (1,)), rank=replica)).files().items()
        (tmp_path / name).write_bytes(content)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["carried-00000.parquet", "carried-00001.parquet"]
    assert found(tmp_path) == groups


def test_file_keeps_episodes_and_reopens_their_prompts(tmp_path: Path) -> None:
    first = Turn(0, 1, 0.1, num_observed=2, observation='"low\u00e9"')
    token_ids, log_probs, versions = int32([4, 5, 6, 7]), float32([-1.0, 0.0, 0.0, -2.0]), int32([3, 0, 0, 4])
    started = Generation(0, token_ids, log_probs, truncated=False, weight_versions=versions, complete=False)
    started = replace(started, turns=(first,))
    ended = replace(started, complete=True, sample=1, turns=(first, Turn(3, 4, 2.0)), stop_reason=StopReason.FAILED)
    group = Group(prompt=prompt(9), samples=(started, replace(ended, fault="it died")), started=3)

    def opened(prompts: Prompts) -> Prompts:
        return Prompts(prompts=[replace(each, token_ids=[9, 9]) for each in prompts.prompts])

    [again] = kept(tmp_path, (group,), opened)
    assert again == replace(group, prompt=replace(group.prompt, token_ids=[9, 9]))
    ended = again.samples[1]
    assert isinstance(ended, Generation)
    assert ended.stop_reason is StopReason.FAILED


def test_staleness_is_of_the_policys_tokens_alone() -> None:
    """An observation has no weights, and counts nowhere."""
    turns = (Turn(0, 2, 0.0, num_observed=3), Turn(5, 6, 1.0))
    versions = int32([5, 6, 0, 0, 0, 8])
    tokens = Generation(0, int32([1] * 6), float32([0.0] * 6), truncated=False, weight_versions=versions, turns=turns)
    ages = staleness(of_groups([Group(prompt=prompt(1), samples=(tokens,), started=5)], Shares()), step=8)
    assert ages == {"rollout/staleness/mean": pytest.approx((3 + 2 + 0) / 3), "rollout/staleness/max": 3.0}


def test_other_data_and_damage_are_named(tmp_path: Path) -> None:
    kept(tmp_path, carried_groups())
    [file] = tmp_path.iterdir()

    def longer(row: int) -> Prompt:
        return replace(prompt(row), token_ids=[1, 2, 3])

    def other_tokens(row: int) -> Prompt:
        return replace(prompt(row), token_ids=[row, row + 2])

    def gone(row: int) -> Prompt:
        raise IndexError(row)

    for other in (longer, other_tokens, gone):
        with pytest.raises(ValueError, match=r"responses to row 1 of data\.train_files.*partial\.enable=false"):
            found(tmp_path, other)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(Damage, match="cannot be read as unfinished samples"):
        found(tmp_path)


def test_tokens_are_read_as_arrays(tmp_path: Path) -> None:
    """Objects for each token would take several times the memory."""
    length = 100_000
    tokens = Generation(
        0, int32(range(length)), float32([-0.5] * length), truncated=False, weight_versions=int32([3] * length)
    )
    file = tmp_path / "file"
    file.write_bytes(to_bytes({0: Group(prompt=prompt(1), samples=(tokens,), started=3)}, Shares()))
    [row] = rows_of(file)
    assert row.sample == tokens
    assert int(run_python("-c", PEAK, file, timeout_s=60)) <= 3 * 12 * length
