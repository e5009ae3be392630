"""Rewards that misbehave: every response gets its result, also the other responses, and nothing stays behind."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from megarl.platform.log import log_to_files
from megarl.platform.processes import descendants
from megarl.rewards.rules import Rules
from megarl.sandbox.pool import Pool, ScoringResult, WorkerLimits
from megarl.sandbox.process import TAIL, text_of
from megarl.sandbox.results import MAX_NUMBERS
from megarl.sandbox.supervisor import MAX_PROCESSES
from megarl.sandbox.wire import pack, unpack
from tests.support.hostile_rewards import SECRET, counts_the_escaped
from tests.support.places import without_places
from tests.support.programs import ROOT

TIMEOUT_S = 3.0
MARK = f"98765.{os.getpid()}"  # seconds that escaped processes sleep: the test finds them by this number
RULES = Rules(path=str(ROOT / "tests" / "support" / "hostile_rewards.py"))
FAILS = {
    "loops": ("timeout", "it took longer than reward_model.timeout_s=3"),
    "loops_in_c": ("timeout", "it took longer"),
    "backtracks": ("timeout", "it took longer"),
    "hears_nothing": ("timeout", "it took longer"),
    "lets_escape_and_loops": ("timeout", "it took longer"),
    "hoards": ("error", "MemoryError"),
    "multiplies": ("error", f"it started more than {MAX_PROCESSES} processes"),
    "has_last_words": ("error", "KeyError: 'answer'; it printed 'first words | last words'"),
    "dies_with_last_words": ("error", "its process ended (exit code 3); it printed 'last words'"),
    "fails_with_a_long_secret": ("error", "x-***; it printed '***-yyy"),
    "prints_a_private_key": ("error", "ValueError; it printed '***'"),
    "says_a_secret": ("error", "not ['***']"),
    "leaves": ("error", "SystemExit: enough"),
    "crashes": ("error", "its process was ended by signal 11"),
    "closes_files": ("error", "its process"),
    "forges": ("error", "its process sent a message of 18446744073709551615 bytes"),
    "kills_its_supervisor": ("error", "the process that watches over rewards failed (EOFError"),
    "says_nan": (
        "error",
        "TypeError: a reward returns a finite number or a dict with such a 'score', not nan",
    ),
    "says_infinity": ("error", "not inf"),
    "says_nothing": ("error", "not None"),
    "says_text": ("error", "not '1.0'"),
    "says_too_much": ("error", "not an integer of too many digits (as float32)"),
    "says_a_giant": ("error", "not 'xxx"),
    "has_no_words": ("error", "SilentError"),
}
SUCCEEDS = {
    "good": 1.0,
    "forks": 0.25,
    "lets_escape": 0.5,
    "says_many_numbers": 1.0,
    "prints_a_gigabyte": 0.5,
    "ends_what_it_starts": 8.0,
}


def arguments(behaviour: str) -> Any:
    return pack({"data_source": "", "solution_str": behaviour, "ground_truth": MARK, "extra_info": {}})


def make_pool(*, held_s: float = 0.0, **changes: Any) -> Pool:
    limits: dict[str, Any] = {"num_workers": 4, "timeout_s": TIMEOUT_S, "max_memory": 500_000_000}
    return Pool(RULES, WorkerLimits(**limits | changes), held_s=held_s)


def outcomes_of(pool: Pool, *behaviours: str) -> list[ScoringResult]:
    return pool.wait([pool.submit(arguments(behaviour)) for behaviour in behaviours])


@pytest.fixture(scope="module", params=["response", "process"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[ScoringResult]]:
    """Of every behaviour, and of a good response after each.

    Those that never end share a pool with little time, all others one with plenty: no load of the machine is a fault.
    """
    found: dict[str, list[ScoringResult]] = {}
    endless = [behaviour for behaviour, (fault, _) in FAILS.items() if fault == "timeout"]
    for behaviours, timeout_s in ((endless, TIMEOUT_S), ([*(FAILS.keys() - endless), *SUCCEEDS], 100.0)):
        asked = [name for behaviour in behaviours for name in (behaviour, "good")]
        pool = make_pool(timeout_s=timeout_s, isolation=request.param)
        for behaviour, outcome in zip(asked, outcomes_of(pool, *asked), strict=True):
            found.setdefault(behaviour, []).append(outcome)
        pool.close()
    return found


@pytest.mark.parametrize("behaviour", FAILS)
def test_unscored_response_has_fault(behaviour: str, outcomes: dict[str, list[ScoringResult]]) -> None:
    ((outcome,), (fault, detail)) = outcomes[behaviour], FAILS[behaviour]
    assert (outcome.fault, outcome.numbers) == (fault, {})
    assert detail in without_places(outcome.detail)
    assert len(outcome.detail) < 1500
    assert "a1B2" not in outcome.detail
    assert outcome.seconds >= TIMEOUT_S * (fault == "timeout")


@pytest.mark.parametrize("behaviour", ["has_last_words", "prints_a_private_key", "leaves", "has_no_words"])
def test_a_failure_names_the_line_of_the_file(behaviour: str, outcomes: dict[str, list[ScoringResult]]) -> None:
    (outcome,) = outcomes[behaviour]
    [line] = re.findall(rf" \({re.escape(RULES.path or '')}:(\d+), `[^`]+`\)", outcome.detail)
    assert Path(RULES.path or "").read_text().splitlines()[int(line) - 1].strip().startswith(("raise", "sys.exit"))


def test_quick_responses_wait_until_someone_waits() -> None:
    with closing(make_pool(num_workers=1, timeout_s=100.0, held_s=1000.0)) as pool:
        outcomes_of(pool, "good", "good")  # the second tells how long one takes
        held = [pool.submit(arguments("good")) for _ in range(3)]
        time.sleep(0.5)
        assert not any(future.done() for future in held)
        assert [outcome.numbers["score"] for outcome in pool.wait(held)] == [1.0] * 3


@pytest.mark.parametrize("held_s", [0.0, 1e-6])
def test_enough_work_is_begun_at_once(held_s: float) -> None:
    with closing(make_pool(num_workers=1, timeout_s=100.0, held_s=held_s)) as pool:
        outcomes_of(pool, "good", "good")
        futures = [pool.submit(arguments("good")) for _ in range(3)]
        assert [future.result(timeout=60.0).numbers["score"] for future in futures] == [1.0] * 3


def test_message_of_failure_has_whole_characters() -> None:
    with closing(make_pool(timeout_s=100.0)) as pool:
        [outcome] = outcomes_of(pool, "says_half_a_character")
    assert without_places(outcome.detail).startswith("ValueError: ?")
    assert outcome.detail.encode()


@pytest.mark.parametrize("behaviour", SUCCEEDS)
def test_a_response_that_is_scored_has_its_score(behaviour: str, outcomes: dict[str, list[ScoringResult]]) -> None:
    for outcome in outcomes[behaviour]:
        assert outcome.fault is None, outcome
        assert outcome.numbers["score"] == SUCCEEDS[behaviour]


def test_extra_numbers_are_few_with_valid_metric_names(
    outcomes: dict[str, list[ScoringResult]],
) -> None:
    (outcome,) = outcomes["says_many_numbers"]
    assert outcome.numbers == {"score": 1.0, "acc": 1.0} | {f"n {i}": float(i) for i in range(MAX_NUMBERS)}


def test_killed_worker_parent_affects_no_other_response() -> None:
    pool = make_pool(num_workers=1, timeout_s=100.0)
    found = outcomes_of(pool, "good", "kills_its_parent", "good")
    pool.close()
    assert [outcome.numbers.get("score") for outcome in found] == [1.0, None, 1.0]
    assert found[1].detail == "its process was ended by signal 9 (Killed)"


@pytest.mark.parametrize("isolation", ["response", "process"])
def test_response_leaves_nothing_for_next_one(isolation: str) -> None:
    pool = make_pool(num_workers=1, isolation=isolation)
    asked = ["lets_escape", "counts_the_escaped", "lets_escape_and_loops", "counts_the_escaped"]
    asked += ["sets_an_alarm", "waits", "sets_a_trap", "waits"]
    found = outcomes_of(pool, *asked)
    pool.close()
    assert [outcome.numbers.get("score") for outcome in found] == [0.5, 0.0, None, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_rule_import_time_is_not_charged_to_response() -> None:
    pool = Pool(Rules(), WorkerLimits(num_workers=1, timeout_s=100.0, max_memory=4_000_000_000))
    row = {"data_source": "math", "ground_truth": "0.5", "extra_info": {}}
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}"]
    first, second = pool.wait([pool.submit(pack(row | {"solution_str": text})) for text in texts])
    pool.close()
    assert (first.numbers, second.numbers) == ({"score": 1.0}, {"score": 0.0})
    code = """
import sys
from megarl.rewards.rules import Rules
for data_source in ("countdown", "math"):
    Rules().warm_up(data_source)
    print("math_verify" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_processes_start_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    with monkeypatch.context() as patient:
        patient.setattr("megarl.sandbox.pool.PATIENCE_S", 1000.0)
        outcomes_of(pool, *["good"] * 5)
        assert len(pool._threads) == 1
    outcomes_of(pool, *["hears_nothing"] * 3)
    assert 2 <= len(pool._threads) <= 4
    pool.close()


def test_work_that_takes_long_has_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.sandbox.pool.PATIENCE_S", 1000.0)
    with closing(make_pool(num_workers=2, timeout_s=100.0)) as pool:
        outcomes_of(pool, "good", "good")
        outcomes_of(pool, "good")
        assert len(pool._threads) == 1
        monkeypatch.setattr("megarl.sandbox.pool.LONG_S", 1e-6)
        outcomes_of(pool, "good")
        assert len(pool._threads) == 2
        outcomes_of(pool, "good")
        assert len(pool._threads) == 2


def test_signals_at_any_time_lose_no_reward() -> None:
    """Signal every process of a job as a launcher does: supervisors that start, workers that load, and busy workers."""
    pools, before, is_over = [make_pool(num_workers=1, timeout_s=100.0) for _ in range(4)], {*descendants()}, Event()

    def storm() -> None:
        while not is_over.is_set():
            for pid in {*descendants()} - before:
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(0.001)

    thread = Thread(target=storm)
    thread.start()
    futures = [[pool.submit(arguments(behaviour)) for behaviour in ("good", "waits", "good")] for pool in pools]
    found = [outcome for pool, asked in zip(pools, futures, strict=True) for outcome in pool.wait(asked)]
    is_over.set()
    thread.join()
    for pool in pools:
        pool.close()
    assert [(outcome.numbers.get("score"), outcome.detail) for outcome in found] == [(1.0, "")] * 12


@pytest.mark.parametrize("place", [0, 1, 2])
def test_response_is_retried_if_its_process_is_killed(place: int) -> None:
    """End the supervisor, its fork server, or the worker: all are the first of their pool."""
    pool, before = make_pool(num_workers=1, timeout_s=100.0), {*descendants()}
    future = pool.submit(arguments("waits"))
    while len(below := [pid for pid in descendants() if pid not in before]) < 3:
        assert not future.done()
        time.sleep(0.02)  # the supervisor may have only this core
    os.kill(below[place], signal.SIGKILL)
    (outcome,) = pool.wait([future])
    pool.close()
    assert (outcome.fault, outcome.numbers) == (None, {"score": 1.0})


def test_rank_with_thousands_of_open_files_gets_rewards() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        pool = make_pool(timeout_s=100.0)
        assert outcomes_of(pool, "good")[0].numbers["score"] == SUCCEEDS["good"]
        pool.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_truncated_output_shows_no_part_of_secret() -> None:
    for cut in range(1, len(SECRET)):
        later = f"\n{'y' * 8000}\n{'z' * (TAIL - 8002 - cut)}"
        printed = f"{'x' * 100} {SECRET}{later}".encode()[-TAIL:]
        assert printed.startswith(SECRET[-cut:].encode() + b"\n")
        assert "y" * 100 in text_of(printed)
        assert SECRET[-cut:] not in text_of(printed)


@pytest.mark.parametrize("isolation", ["response", "process"])
def test_printed_text_reaches_a_file(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import sys\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    stream.write('loads')\n"
        "def compute_score(solution_str, **_):\n"
        "    print('looks at', solution_str)\n"
        f"    print('{SECRET}', end='', file=sys.stderr)\n"
        "    sys.stdout.write('ends')\n"
        "    return 1.0 if solution_str == 'good' else solution_str\n"
    )
    log_to_files(tmp_path, 0)
    limits = WorkerLimits(num_workers=2, timeout_s=100.0, max_memory=500_000_000, isolation=isolation)  # type: ignore[arg-type]
    with closing(Pool(Rules(path=str(tmp_path / "own.py")), limits)) as pool:
        outcomes_of(pool, "good", "bad")
    written = (tmp_path / "log" / "rewards.txt").read_text()
    assert re.search(r"^\S+ \S+ looks at good$", written, re.MULTILINE)
    assert re.search(r"^\S+ \S+ looks at bad$", written, re.MULTILINE)
    assert written.count("ends") == 2
    assert written.count("***") == 2
    assert SECRET not in written
    assert "loads" not in written
    assert not (tmp_path / "log" / "rank_0.txt").exists()


RANK = """
import sys
from megarl.sandbox.pool import WorkerLimits, Pool
from megarl.rewards.rules import Rules
from megarl.sandbox.wire import pack
pool = Pool(Rules(path=sys.argv[1]), WorkerLimits(num_workers=1, timeout_s=1000, max_memory=500_000_000))
row = {"data_source": "", "ground_truth": sys.argv[2], "extra_info": {}}
pool.wait([pool.submit(pack(row | {"solution_str": "lets_escape_and_loops"}))])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_rank(number: signal.Signals) -> None:
    mark = f"{MARK}{int(number)}"
    with subprocess.Popen([sys.executable, "-c", RANK, str(RULES.path), mark], cwd=ROOT) as rank:
        while not counts_the_escaped(mark):
            assert rank.poll() is None
            time.sleep(0.05)
        below = [*descendants(rank.pid)]
        assert len(below) >= 4  # supervisor, fork server, worker, and the escaped process
        rank.send_signal(number)
    while counts_the_escaped(mark) or any(map(runs, below)):
        time.sleep(0.05)  # until the test's own time limit


def runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # that of a zombie is empty
    except OSError:
        return False


def test_the_processes_of_a_rank_are_small() -> None:
    """A worker that imported torch would take seconds to start and half a gigabyte."""
    code = (
        "import sys, megarl.rewards.supervisor; print([name for name in sys.modules if name in ('torch', 'pydantic')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        "\ud800 and \x00",
        b"\xff\x00",
        Decimal("1.50"),
        datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=UTC),
        date(2024, 2, 29),
        clock(1, 2, 3),
        timedelta(days=-1, microseconds=7),
        {"target": 8, "numbers": [3, 5], "dict": {"bytes": None}, 4: (1, "a")},
    ],
)
def test_values_of_rows_arrive_as_what_they_were(value: Any) -> None:
    arrived = unpack(json.loads(json.dumps(pack(value))))
    assert (arrived, type(arrived)) == (value, type(value))


def test_arrays_become_lists_and_unsupported_types_are_refused() -> None:
    assert unpack(pack({"x": np.arange(3), "y": np.float32(0.5)})) == {"x": [0, 1, 2], "y": 0.5}
    with pytest.raises(TypeError, match="a Pool cannot be passed to a reward"):
        pack({"x": [Pool(Rules(), WorkerLimits(num_workers=1, timeout_s=1.0, max_memory=1))]})
