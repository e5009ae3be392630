"""The samples of a step over several replicas: who draws what, when each knows of the others, and what it costs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.platform import progress
from megarl.batch import Generation, Group, Prompt, Turn
from megarl.rollout import drawing as drawing_of_replica
from megarl.rollout.session import WINDOW, Session


class Replicas:
    """Engines that exchange what they have, each in a thread."""

    def __init__(self, number: int) -> None:
        self.barrier, self.said = Barrier(number), dict[int, Any]()
        self.engines = [Engine(self, replica, number) for replica in range(number)]


@dataclass
class Engine:
    replicas: Replicas
    replica: int
    num_replicas: int

    def on_all_ranks(self, generate: Callable[[], Any]) -> list[Any]:
        self.replicas.said[self.replica] = generate()
        self.replicas.barrier.wait()
        said = [self.replicas.said[replica] for replica in range(self.num_replicas)]
        self.replicas.barrier.wait()
        return said


@dataclass
class Drawing:
    """Draws one token of every sample in a step. The responses to row `r` have `r` tokens."""

    open: list[Generation] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_running: int = 0

    def add(self, groups: list[Group]) -> None:
        self.rows += [group.prompt.index for group in groups]
        for group in groups:
            self.lengths[group.samples[0].prompt] = group.prompt.index
            self.open += [sample for sample in group.samples if not sample.complete]

    def run(self, num_steps: int | None) -> list[Generation]:
        found, left = [], num_steps
        while self.open and left != 0:
            left = left and left - 1
            self.num_steps += 1
            self.num_running += len(self.open)
            self.open = [self._longer(sample) for sample in self.open]
            found += [sample for sample in self.open if sample.complete]
            self.open = [sample for sample in self.open if not sample.complete]
        return found

    def stop(self) -> list[Generation]:
        stopped, self.open = self.open, []
        return stopped

    def _longer(self, sample: Generation) -> Generation:
        drawn = Generation(0, [1], [-1.0], truncated=False)
        longer = sample.then(drawn)
        return replace(longer, complete=len(longer.token_ids) == self.lengths[sample.prompt])


def group(row: int, *, samples: int = 1) -> Group:
    asked = Prompt(index=row, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={})
    return Group.new(asked, range(samples), begun=0)


def on_replicas(number: int, use: Callable[[Session], Any]) -> tuple[Any, list[list[int]]]:
    """Return what `use` returns, the same on every replica, and the rows that each replica drew."""
    drawings = [Drawing() for _ in range(number)]

    def work(engine: Engine) -> Any:
        return use(Session(engine, drawings[engine.replica], num_slots=64))  # type: ignore[arg-type]

    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(work, Replicas(number).engines))
    assert all(one == found[0] for one in found)
    return found[0], [drawing.rows for drawing in drawings]


def test_equal_prompts_are_dealt_in_turn() -> None:
    def use(session: Session) -> list[int]:
        session.add({number: group(5, samples=2) for number in range(5)})
        return list(session.advance(None))

    found, rows = on_replicas(2, use)
    assert found == [0, 1, 2, 3, 4]
    assert [len(of_replica) for of_replica in rows] == [3, 2]


def test_a_prompt_goes_to_the_replica_with_the_fewest_open_samples() -> None:
    """The replica that draws rows 2 and 3 is done when the other still draws rows 40 and 50."""

    def use(session: Session) -> list[list[int]]:
        session.add({number: group(row) for number, row in enumerate([40, 2, 50, 3])})
        first = list(session.advance())
        session.add({4: group(7), 5: group(8)})
        return [first, list(session.advance()), list(session.advance()), list(session.advance())]

    found, rows = on_replicas(2, use)
    assert found == [[1, 3], [4, 5], [0], [2]]  # after 16, 32, 48 and 64 steps
    assert rows == [[40, 50], [2, 3, 7, 8]]


def test_occupancy_by_hand() -> None:
    """Rows 2 and 4 run for 4 steps with 2 + 4 tokens, rows 40 and 8 for 16 + 16 + 8 steps with 40 + 8 tokens."""

    def use(session: Session) -> float:
        session.add({number: group(row) for number, row in enumerate([2, 40, 4, 8])})
        while session.num_open:
            session.advance()
        return session.occupancy()

    assert WINDOW == 16
    found, _ = on_replicas(2, use)
    assert found == pytest.approx((2 + 4 + 40 + 8) / (40 * 2 * 2))  # steps x replicas x slots


def test_stopped_groups_keep_their_tokens_and_complete_samples() -> None:
    begun = group(20, samples=2)
    done = replace(begun.samples[1], token_ids=[9] * 20, log_probs=[-1.0] * 20, complete=True)
    begun = replace(begun, samples=(begun.samples[0], done))

    def use(session: Session) -> dict[int, Group]:
        session.add({7: begun, 8: group(3)})
        assert list(session.advance()) == [8]
        return session.stop()

    found, rows = on_replicas(1, use)
    assert rows == [[20, 3]]
    assert list(found) == [7]
    first, second = found[7].samples
    assert (len(first.token_ids), first.complete) == (16, False)
    assert (second.token_ids, second.complete) == ([9] * 20, True)


class Stepper:
    """Finishes one request in each step."""

    def __init__(self) -> None:
        self.requests = list[tuple[str, list[int]]]()

    def add(self, token_ids: list[int], params: Any) -> str:
        self.requests.append((str(len(self.requests)), token_ids))
        return self.requests[-1][0]

    def step(self) -> list[Any]:
        name, asked = self.requests.pop(0)
        sample = SimpleNamespace(token_ids=[1], logprobs=None, finish_reason="stop")
        return [
            SimpleNamespace(
                request_id=name, prompt_token_ids=asked, outputs=[sample], finished=True, num_cached_tokens=0
            )
        ]


def test_people_see_responses_arrive() -> None:
    seen = []
    drawing = drawing_of_replica.Drawing(
        Stepper(),  # type: ignore[arg-type]
        SimpleNamespace(params=lambda asked: None),  # type: ignore[arg-type]
        around=lambda prompts: nullcontext(),
        weight_version=0,
        num_slots=8,
        finished=lambda *sample: seen.append(progress.now()),
    )
    [engine] = Replicas(1).engines
    session = Session(engine, drawing, num_slots=8)  # type: ignore[arg-type]
    with progress.within("gen"):
        session.add({0: group(5, samples=2), 1: group(6)})
        session.advance(None)
    assert [(phase.done, phase.total, phase.unit) for phase in seen if phase] == [
        (1, 3, "responses"),
        (2, 3, "responses"),
        (3, 3, "responses"),
    ]


@dataclass
class Environment:
    """Answers to the turns of row `r` that it has `r` turns, with as many tokens as the turn has samples before it."""

    overlap: int
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # the number, sample and length of each turn

    def answer(self, said: list[Generation]) -> list[Generation]:
        self.asked += [(each.prompt, each.sample, len(each.token_ids)) for each in said]
        return [self._after(each) for each in said]

    def _after(self, said: Generation) -> Generation:
        turns = (*said.turns, Turn(0, 1, 1.0))
        if len(turns) == 3:
            return replace(said, turns=turns, complete=True)
        return replace(said, turns=turns, complete=False, token_ids=[*said.token_ids, 9, 9])


@dataclass
class TurnDrawing(Drawing):
    """Ends a turn of row `r` after `r` tokens, whatever was said before."""

    asked: list[tuple[int, list[int]]] = field(default_factory=list)  # engine step, tokens of each request

    def add(self, groups: list[Group]) -> None:
        super().add(groups)
        self.asked += [(self.num_steps, sample.token_ids) for group in groups for sample in group.samples]
        for group in groups:
            for sample in group.samples:
                self.lengths[sample.prompt] = group.prompt.index

    def _longer(self, sample: Generation) -> Generation:
        longer = sample.then(Generation(0, [1], [-1.0], truncated=False))
        said = len(longer.token_ids) - 2 * len(longer.turns)
        return replace(longer, complete=said == self.lengths[sample.prompt] * (len(longer.turns) + 1))


def play(rows: list[int], *, overlap: int, replicas: int = 1) -> tuple[dict[int, Group], list[Any], list[Environment]]:
    drawings = [TurnDrawing() for _ in range(replicas)]
    environments = [Environment(overlap) for _ in range(replicas)]

    def work(engine: Engine) -> dict[int, Group]:
        drawing, episodes = drawings[engine.replica], environments[engine.replica]
        session = Session(engine, drawing, num_slots=64, episodes=episodes)  # type: ignore[arg-type]
        session.add({number: group(row, samples=2) for number, row in enumerate(rows)})
        return session.advance(None)

    with ThreadPoolExecutor(replicas) as pool:
        found = list(pool.map(work, Replicas(replicas).engines))
    assert all(one == found[0] for one in found)
    return found[0], [drawing.asked for drawing in drawings], environments


def test_a_request_continues_with_all_tokens_so_far() -> None:
    found, [asked], _ = play([2], overlap=1)
    assert asked == [
        *[(0, [])] * 2,
        *[(2, [1, 1, 9, 9])] * 2,  # nothing else is drawn: the answers are taken at once
        *[(4, [1, 1, 9, 9, 1, 1, 9, 9])] * 2,
    ]
    assert [len(sample.turns) for sample in found[0].samples] == [3, 3]
    assert found[0].samples[1].token_ids == [1, 1, 9, 9, 1, 1, 9, 9, 1, 1]


@pytest.mark.parametrize(("overlap", "steps"), [(0, [16, 32]), (1, [32, 64]), (2, [48, 96])])
def test_the_engine_goes_on_for_a_counted_number_of_windows(overlap: int, steps: list[int]) -> None:
    """Row 100 keeps the engine busy while row 3 waits: its turns end in the first window after their start."""
    _, [asked], _ = play([100, 3], overlap=overlap)
    assert [step for step, tokens in asked if len(tokens) in (5, 10)] == [steps[0]] * 2 + [steps[1]] * 2


def test_turns_that_wait_are_answered_when_a_session_stops() -> None:
    """Row 3 waits for the answers to its first turns; row 100 is in the middle of them."""
    [engine], environment = Replicas(1).engines, Environment(overlap=5)
    session = Session(engine, TurnDrawing(), num_slots=64, episodes=environment)  # type: ignore[arg-type]
    session.add({0: group(100, samples=2), 1: group(3, samples=2)})
    assert session.advance() == {}
    found = session.stop()
    assert [sample.token_ids for sample in found[1].samples] == [[1, 1, 1, 9, 9]] * 2
    assert [len(sample.turns) for sample in found[1].samples] == [1, 1]
    assert [len(sample.token_ids) for sample in found[0].samples] == [WINDOW] * 2
    assert not any(sample.complete for group in found.values() for sample in group.samples)
    assert environment.asked == [(1, 0, 3), (1, 1, 3)]


def test_all_replicas_take_the_same_answers_in_the_same_order() -> None:
    found, asked, environments = play([20, 3, 7, 40], overlap=1, replicas=2)
    assert sorted(found) == [0, 1, 2, 3]
    assert environments[0].asked == environments[1].asked
    assert sorted(environments[0].asked) == sorted(
        (number, sample, (row + 2) * turn + row)
        for number, row in enumerate([20, 3, 7, 40])
        for sample in range(2)
        for turn in range(3)
    )
    assert [len(of_replica) for of_replica in asked] == [12, 12]
