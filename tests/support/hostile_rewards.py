"""A custom reward whose functions do what a reward must not; the response names the function to call.

The ground truth is how many seconds escaped processes sleep. Tests find these processes by the number.
"""

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SECRET = "hf_" + "a1B2" * 8


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    behaviour = globals()[solution_str]
    return behaviour(ground_truth) if "escape" in solution_str else behaviour()


def good() -> float:
    return 1.0


def loops() -> None:
    while True:
        pass


def loops_in_c() -> None:
    all(itertools.repeat(True))


def backtracks() -> None:
    re.match("(a+)+$", "a" * 64 + "b")


def hears_nothing() -> None:
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def hoards() -> None:
    held = []
    while True:
        held.append(bytes(1 << 24))  # never touched, so it takes no time


def forks() -> float:
    os.fork()
    return 0.25


def multiplies() -> None:
    while True:
        if os.fork() == 0:
            time.sleep(1000)


def lets_escape(mark: str) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", mark])
        os._exit(0)
    os.wait()
    return 0.5


def lets_escape_and_loops(mark: str) -> None:
    lets_escape(mark)
    loops()


def counts_the_escaped(mark: str) -> int:
    count = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it is gone
            count += file.read_bytes() == f"sleep\0{mark}\0".encode()
    return count


def prints_a_gigabyte() -> float:
    for _ in range(1024):
        os.write(1, b"x" * (1 << 20))
    return 0.5


def has_last_words() -> None:
    print("first words", file=sys.stderr)
    print("last words")
    raise KeyError("answer")


def dies_with_last_words() -> None:
    print("last words")
    os._exit(3)


def fails_with_a_long_secret() -> None:
    print(f"{SECRET}-{'y' * 178}")
    raise ValueError("x" * 480 + f"-{SECRET}")


def prints_a_private_key() -> None:
    print("-----BEGIN PRIVATE KEY-----", *["a1B2" * 16] * 40, "-----END PRIVATE KEY-----", sep="\n")
    raise ValueError


def says_a_secret() -> list[str]:
    return [SECRET]


def leaves() -> None:
    sys.exit("enough")


def crashes() -> None:
    ctypes.string_at(0)


def closes_files() -> float:
    os.closerange(0, 1000)
    return 1.0


def forges() -> float:
    for number in range(3, 100):
        with suppress(OSError):
            os.write(number, b"\xff" * 64)
    return 1.0


def kills_its_supervisor() -> None:
    """Kill the outermost process of the supervisor's program: what it forks has the same command."""
    pid = os.getpid()
    while b"megarl.rewards.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes():
        supervisor, pid = pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(1000)


def kills_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def sets_an_alarm() -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def sets_a_trap() -> float:
    threading.Timer(0.1, os._exit, (1,)).start()
    return 1.0


def waits() -> float:
    time.sleep(0.3)
    return 1.0


def says_nan() -> float:
    return float("nan")


def says_infinity() -> float:
    return float("inf")


def says_nothing() -> None:
    return None


def says_text() -> str:
    return "1.0"


def says_too_much() -> int:
    return 10**5000


def says_a_giant() -> str:
    return "x" * 10**7


def says_many_numbers() -> dict[str, Any]:
    odd = {"text": "no number", "nan": float("nan")}
    return {"score": 1, "acc": True} | odd | {f"n {number}": number for number in range(9999)}


def ends_what_it_starts() -> float:
    """Return how many of its programs and forks end by the signals that this process ignores."""
    ended = 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        with subprocess.Popen(["sleep", "1000"]) as program:
            program.send_signal(number)
            ended += program.wait() == -number
        if (fork := os.fork()) == 0:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(number)
                time.sleep(1000)
            os._exit(number)
        _, status = os.waitpid(fork, 0)
        ended += abs(os.waitstatus_to_exitcode(status)) == number
    return float(ended)


def says_half_a_character() -> None:
    raise ValueError("\ud83d")


def has_no_words() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise self

    raise SilentError
