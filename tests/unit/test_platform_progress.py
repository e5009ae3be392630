"""The phase of this process: what is counted, what is expected, and the time left."""

from dataclasses import replace

import pytest

from megarl.platform import progress
from megarl.platform.progress import Phase
from megarl.tracking.console import describe


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_ended", {})


def current() -> Phase:
    phase = progress.now()
    assert phase
    return phase


def test_phases_nest_and_end_with_an_error() -> None:
    with pytest.raises(RuntimeError), progress.within("gen"):
        progress.announce(8, "responses")
        with progress.within("sync"):
            assert (current().name, current().total) == ("sync", 0)
        assert (current().name, current().total) == ("gen", 8)
        raise RuntimeError
    assert progress.now() is None


def test_work_outside_of_phases_is_not_counted() -> None:
    progress.announce(8, "responses")
    progress.advance()
    assert progress.now() is None


def test_no_more_is_done_than_announced() -> None:
    with progress.within("gen"):
        progress.announce(3, "responses")
        progress.advance(2)
        progress.advance(2)
        assert (current().done, current().total) == (3, 3)


def test_the_next_time_as_much_work_is_expected() -> None:
    with progress.within("update_actor"):
        for _ in range(2):  # mini-batches announce one after the other
            progress.announce(4, "micro-batches")
            progress.advance(4)
    with progress.within("update_actor"):
        assert (current().expected, current().unit) == (8, "micro-batches")  # before the phase announces its work
        progress.announce(4, "micro-batches")
        progress.advance(3)
        assert (current().done, current().total, current().expected) == (3, 4, 8)


def test_time_left_follows_last_duration_or_completed_share() -> None:
    phase = Phase(name="gen", since=100.0, done=2, total=8, unit="responses")
    assert phase.left(110.0) == 30.0  # 10 s for 2, so 30 s for 6
    assert replace(phase, done=0).left(110.0) is None
    usual = Phase(name="gen", since=0.0, total=8, seconds=25.0)
    assert replace(phase, usual=usual).left(110.0) == 15.0
    assert replace(phase, usual=usual).left(130.0) == 90.0  # longer than the last time: the share again


def test_a_phase_in_words() -> None:
    phase = Phase(name="reward", since=0.0, done=1200, total=4800, unit="rewards")
    assert describe(phase, 61.0) == "scoring  1,200 of 4,800 rewards  0:01:01, left 0:03:03"
    assert describe(Phase(name="own_phase", since=0.0), 2.0) == "own_phase  0:00:02"
