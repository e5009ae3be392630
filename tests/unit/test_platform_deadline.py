"""Foreign code that computes too long is interrupted, whatever errors it catches."""

import mmap
import signal
import threading
from contextlib import suppress

import pytest

from megarl.platform.deadline import computing_at_most


def catches_everything() -> None:
    while True:
        try:  # noqa: SIM105 - as such code does
            sum(range(1000))
        except Exception:  # noqa: S110
            pass


def lets_the_kernel_work() -> None:
    while True:
        mmap.mmap(-1, 1 << 24).write(bytes(1 << 24))  # page faults are most of its time


class Resists:
    """Computes in its destructor, in which Python ignores every error."""

    def __del__(self) -> None:
        while True:
            sum(range(1000))


def destroys_and_continues() -> None:
    Resists()
    catches_everything()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "endless", [catches_everything, destroys_and_continues, lets_the_kernel_work, lambda: 9 ** int("100000000")]
)
def test_endless_code_is_interrupted_and_signals_are_restored(endless: object) -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(TimeoutError), computing_at_most(0.1):
        endless()  # type: ignore[operator]
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_quick_code_and_other_threads_go_on() -> None:
    with computing_at_most(10):
        found = [1]
    with pytest.raises(KeyError), computing_at_most(10):
        raise KeyError

    def compute() -> None:
        with computing_at_most(1e-6):
            found.append(sum(range(10_000)))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [1, 49_995_000]


def test_inner_deadline_leaves_the_outer_deadline() -> None:
    with computing_at_most(10):
        with computing_at_most(1000):
            assert signal.getitimer(signal.ITIMER_PROF)[0] < 20
            sum(range(1_000_000))
        assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] < 20
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    with pytest.raises(TimeoutError), computing_at_most(0.05):
        with suppress(TimeoutError), computing_at_most(10):
            catches_everything()
        catches_everything()


def test_deadline_at_block_end_raises_only_timeout_error() -> None:
    """Whenever the signal arrives, nothing but a TimeoutError leaves the block."""
    for _ in range(2000):
        with suppress(TimeoutError), computing_at_most(1e-3):
            sum(range(20_000))
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
