"""The samples of a step over several replicas: who draws what, when each knows of the others, and what it costs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from megarl.batch import Generation, Group, RemoteSample, Sample, float32, int32
from megarl.rollout.session import WINDOW, SamplingSession
from tests.support.replicas import Engine, Environment, Queue, Replicas, TurnQueue, group, merged


def on_replicas(number: int, use: Callable[[SamplingSession], Any]) -> tuple[Any, list[list[int]]]:
    """Return what `use` returns, the same on every replica, and the rows that each replica drew."""
    queues = [Queue() for _ in range(number)]

    def work(engine: Engine) -> Any:
        return use(SamplingSession(engine, queues[engine.replica], num_slots=64))  # type: ignore[arg-type]

    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(work, Replicas(number).engines))
    assert all(one == found[0] for one in found)
    return found[0], [queue.rows for queue in queues]


def test_equal_prompts_are_dealt_in_turn() -> None:
    def use(session: SamplingSession) -> list[int]:
        session.add({number: group(5, samples=2) for number in range(5)})
        return list(session.advance(None))

    found, rows = on_replicas(2, use)
    assert found == [0, 1, 2, 3, 4]
    assert [len(of_replica) for of_replica in rows] == [3, 2]


def test_replica_with_fewest_open_samples_gets_prompt() -> None:
    """The replica that draws rows 2 and 3 is done when the other still draws rows 40 and 50."""

    def use(session: SamplingSession) -> list[list[int]]:
        session.add({number: group(row) for number, row in enumerate([40, 2, 50, 3])})
        first = list(session.advance())
        session.add({4: group(7), 5: group(8)})
        return [first, list(session.advance()), list(session.advance()), list(session.advance())]

    found, rows = on_replicas(2, use)
    assert found == [[1, 3], [4, 5], [0], [2]]  # after 16, 32, 48 and 64 steps
    assert rows == [[40, 50], [2, 3, 7, 8]]


def test_occupancy_by_hand() -> None:
    """Rows 2 and 4 run for 4 steps with 2 + 4 tokens, rows 40 and 8 for 16 + 16 + 8 steps with 40 + 8 tokens."""

    def use(session: SamplingSession) -> float:
        session.add({number: group(row) for number, row in enumerate([2, 40, 4, 8])})
        while session.num_open:
            session.advance()
        return session.occupancy()

    assert WINDOW == 16
    found, _ = on_replicas(2, use)
    assert found == pytest.approx((2 + 4 + 40 + 8) / (40 * 2 * 2))  # steps x replicas x slots


def test_stopped_groups_keep_their_tokens_and_complete_samples() -> None:
    started = group(20, samples=2)
    first, last = started.samples
    assert isinstance(last, Generation)
    done = replace(last, token_ids=int32([9]) * 20, log_probs=float32([-1.0]) * 20, complete=True)
    started = replace(started, samples=(first, done))

    def use(session: SamplingSession) -> dict[int, Group]:
        session.add({7: started, 8: group(3)})
        assert list(session.advance()) == [8]
        return session.stop()

    found, rows = on_replicas(1, use)
    assert rows == [[20, 3]]
    assert list(found) == [7]
    first, second = merged([found])[7].samples
    assert isinstance(second, Generation)
    assert (first.num_tokens, first.complete) == (16, False)
    assert (second.token_ids, second.complete) == (int32([9]) * 20, True)


def share(rows: list[int], *, replicas: int, room: int, samples: int = 1) -> tuple[dict[int, Group], list[Any]]:
    """Return the groups of a step whose replicas have room for so many samples, and for each replica what it did."""
    queues = [Queue(room) for _ in range(replicas)]

    def work(engine: Engine) -> tuple[dict[int, Group], Any]:
        engine.room = room
        session = SamplingSession(engine, queues[engine.replica], num_slots=room)  # type: ignore[arg-type]
        session.add({number: group(row, samples=samples) for number, row in enumerate(rows)})
        found = session.advance(None)
        return found, (queues[engine.replica].rows, engine.num_exchanges, session.occupancy())

    with ThreadPoolExecutor(replicas) as pool:
        groups, did = zip(*pool.map(work, Replicas(replicas).engines), strict=True)
    return merged(groups), list(did)


def test_replica_with_fewest_open_samples_gets_waiting_group() -> None:
    """Rows 40, 41 and 42 are dealt to the first of two replicas. Row 42 begins at the second, after 16 steps.

    Nothing waits at the next exchange, so the third is the last.
    """
    _, did = share([40, 3, 41, 4, 42, 5], replicas=2, room=2)
    drawn = 40 + 3 + 41 + 4 + 42 + 5
    assert did == [([40, 41], 3, drawn / ((16 + 42) * 2 * 2)), ([3, 4, 5, 42], 3, drawn / ((16 + 42) * 2 * 2))]


def test_step_with_capacity_for_all_samples_exchanges_once() -> None:
    _, did = share([40, 3, 41, 4, 42, 5], replicas=2, room=3)
    assert [each[:2] for each in did] == [([40, 41, 42], 1), ([3, 4, 5], 1)]


def test_waiting_group_stays_unless_move_reduces_load() -> None:
    """After 16 steps, the first replica has 2 + 2 open samples, and the second has 2."""
    _, did = share([20, 40, 3], replicas=2, room=2, samples=2)
    assert [each[0] for each in did] == [[20, 3], [40]]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("room", [1, 2, 5, 99])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_samples_do_not_depend_on_replica_capacity(replicas: int, room: int, samples: int) -> None:
    rows = [3, 90, 1, 64, 50, 2, 33, 8, 71, 5, 17, 20, 4]
    found, did = share(rows, replicas=replicas, room=room, samples=samples)
    assert {number: group.prompt.index for number, group in found.items()} == dict(enumerate(rows))
    for row, of_row in zip(rows, (found[number] for number in range(len(rows))), strict=True):
        assert [sample.num_tokens for sample in of_row.samples] == [row] * samples
    assert sorted(row for drawn, _, _ in did for row in drawn) == sorted(rows)


def play(rows: list[int], *, overlap: int, replicas: int = 1) -> tuple[dict[int, Group], list[Any], list[Environment]]:
    queues = [TurnQueue() for _ in range(replicas)]
    environments = [Environment(overlap) for _ in range(replicas)]

    def work(engine: Engine) -> dict[int, Group]:
        queue, episodes = queues[engine.replica], environments[engine.replica]
        session = SamplingSession(engine, queue, num_slots=64, episodes=episodes)  # type: ignore[arg-type]
        session.add({number: group(row, samples=2) for number, row in enumerate(rows)})
        return session.advance(None)

    with ThreadPoolExecutor(replicas) as pool:
        found = list(pool.map(work, Replicas(replicas).engines))
    return merged(found), [queue.asked for queue in queues], environments


def test_a_request_continues_with_all_tokens_so_far() -> None:
    found, [asked], _ = play([2], overlap=1)
    assert asked == [
        *[(0, [])] * 2,
        *[(2, [1, 1, 9, 9])] * 2,  # nothing else is drawn: the answers are taken at once
        *[(4, [1, 1, 9, 9, 1, 1, 9, 9])] * 2,
    ]
    assert [sample.num_turns for sample in found[0].samples] == [3, 3]
    _, second = found[0].samples
    assert isinstance(second, Generation)
    assert second.token_ids.tolist() == [1, 1, 9, 9, 1, 1, 9, 9, 1, 1]


@pytest.mark.parametrize(("overlap", "steps"), [(0, [16, 32]), (1, [32, 64]), (2, [48, 96])])
def test_engine_continues_for_counted_number_of_windows(overlap: int, steps: list[int]) -> None:
    """Row 100 keeps the engine busy while row 3 waits: its turns end in the first window after their start."""
    _, [asked], _ = play([100, 3], overlap=overlap)
    assert [step for step, tokens in asked if len(tokens) in (5, 10)] == [steps[0]] * 2 + [steps[1]] * 2


def test_waiting_turns_are_answered_when_session_stops() -> None:
    """Row 3 waits for the answers to its first turns; row 100 is in the middle of them."""
    [engine], environment = Replicas(1).engines, Environment(overlap=5)
    session = SamplingSession(engine, TurnQueue(), num_slots=64, episodes=environment)  # type: ignore[arg-type]
    session.add({0: group(100, samples=2), 1: group(3, samples=2)})
    assert session.advance() == {}
    found = session.stop()
    samples = [each for each in found[1].samples if isinstance(each, Generation)]
    assert [each.token_ids.tolist() for each in samples] == [[1, 1, 1, 9, 9]] * 2
    assert [each.num_turns for each in samples] == [1, 1]
    assert [each.num_tokens for each in found[0].samples] == [WINDOW] * 2
    assert not any(sample.complete for group in found.values() for sample in group.samples)
    assert environment.asked == [(1, 0, 3), (1, 1, 3)]


def test_each_replica_answers_its_own_episodes() -> None:
    found, asked, environments = play([20, 3, 7, 40], overlap=1, replicas=2)
    assert sorted(found) == [0, 1, 2, 3]
    answered = [{number for number, _, _ in environment.asked} for environment in environments]
    assert answered == [{0, 2}, {1, 3}]
    assert sorted(chain.from_iterable(environment.asked for environment in environments)) == sorted(
        (number, sample, (row + 2) * turn + row)
        for number, row in enumerate([20, 3, 7, 40])
        for sample in range(2)
        for turn in range(3)
    )
    assert [len(of_replica) for of_replica in asked] == [12, 12]


def test_replica_has_tokens_of_its_own_samples_alone() -> None:
    def work(engine: Engine) -> list[Sample]:
        session = SamplingSession(engine, Queue(), num_slots=64)  # type: ignore[arg-type]
        session.add({0: group(4), 1: group(5)})
        complete = session.advance(None)
        return [sample for number in range(2) for sample in complete[number].samples]

    with ThreadPoolExecutor(2) as pool:
        (first, far_second), (far_first, second) = pool.map(work, Replicas(2).engines)
    assert isinstance(first, Generation) and isinstance(second, Generation)
    assert (first.token_ids, second.token_ids) == (int32([1] * 4), int32([1] * 5))
    known = {"num_turns": 0, "has_log_probs": True, "truncated": False, "complete": True}
    assert far_first == RemoteSample(0, 0, replica=0, num_tokens=4, num_learnt=4, **known)
    assert far_second == RemoteSample(1, 0, replica=1, num_tokens=5, num_learnt=5, **known)


def test_group_with_tokens_stays_with_its_replica() -> None:
    """Rows 30 and 31 have tokens on the second of two replicas. The others are dealt to the first, which has fewer."""
    queues = [Queue(), Queue()]

    def begun(engine: Engine, row: int) -> Group:
        [sample] = group(row).samples
        assert isinstance(sample, Generation)
        sample = replace(sample, token_ids=int32([1] * 5), log_probs=float32([-1.0] * 5))
        return replace(group(row), samples=(sample if engine.replica == 1 else sample.as_remote(1),))

    def work(engine: Engine) -> dict[int, Group]:
        session = SamplingSession(engine, queues[engine.replica], num_slots=64)  # type: ignore[arg-type]
        session.add({0: group(4), 1: begun(engine, 30), 2: group(5), 3: begun(engine, 31)})
        return session.advance(None)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, Replicas(2).engines))
    assert [queue.rows for queue in queues] == [[4, 5], [30, 31]]
    assert [each.num_tokens for number in range(4) for each in merged(found)[number].samples] == [4, 30, 5, 31]
    assert isinstance(found[0][1].samples[0], RemoteSample)
