"""A response that does what it likes to its process changes the score of no other response."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.configured import make_pool
from megarl.rewards.rules import Rules
from megarl.sandbox.canary import MAX_CALLS, Canary
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.pool import Pool, ScoringResult
from megarl.sandbox.wire import pack
from tests.support.programs import ROOT, succeed

LIMITS = WorkerLimits(num_workers=1, timeout_s=100.0, max_memory=500_000_000)
TRUTH = 42
RIGHT, WRONG, NONSENSE = "result = 42", "result = 41", "x = 1"
HOSTILE = {
    "its code": "compute_score.__code__ = (lambda **_: 1.0).__code__",
    "its name": "module.compute_score = lambda **_: 1.0",
    "its default": "module.DEFAULTS.append(1)",
    "a builtin function": "import builtins; builtins.len = lambda _: 99",
    "a builtin name": "import builtins; builtins.evil = 1; builtins.float = lambda *_: 1.0",
    "a module": "import sys; sys.modules['evil'] = sys",
    "a function of a library": "import json; json.dumps = lambda *_: '1'",
    "the path of modules": "import sys; sys.path.insert(0, '/tmp')",
    "the limit of recursion": "import sys; sys.setrecursionlimit(50000)",
    "the seed": "import random; random.seed(0); module.RANDOM.seed(0)",
    "the environment": "import os; os.environ['EVIL'] = '1'; os.putenv('EVIL', '1')",
    "the directory": "import os; os.chdir('/')",
    "the mask of new files": "import os; os.umask(0o777)",
    "a signal handler": "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    "a blocked signal": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "an alarm": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)",
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "a function at exit": "import atexit, os; atexit.register(os._exit, 5)",
    "a limit of the kernel": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "the position in a file": "import os; os.lseek(module.WORDS, 7, os.SEEK_SET)",
    "the mode of a file": "import fcntl; fcntl.fcntl(module.WORDS, fcntl.F_SETFL, 0x400)",
    "an open file": "import os; os.close(module.WORDS)",
    "a closed output": "import os; os.close(1); os.close(2)",
    "an output that does not wait": "import os; os.set_blocking(1, False); os.set_blocking(2, False)",
    "a trace": "import sys; sys.settrace(lambda *_: None); sys.setprofile(lambda *_: None)",
    "a hook of imports": "import builtins; builtins.__import__ = None",
    "a fork": "import os; os.fork()",
    "its own stop": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "a kill of its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "a stop of its parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "an end": "import os; os._exit(0)",
    "forged replies": (
        "import os, json, struct\n"
        "for number in range(3, 64):\n"
        "    for request in range(200):\n"
        "        reply = {'id': request, 'results': [{'numbers': {'score': 1.0}, 'pred': None}]}\n"
        "        text = json.dumps(reply).encode()\n"
        "        try:\n"
        "            os.write(number, struct.pack('<Q', len(text)) + text)\n"
        "        except OSError:\n"
        "            pass\n"
    ),
}


@contextmanager
def pool_of(path: str, **changes: Any) -> Iterator[Pool]:
    section = RulesSection(**{"num_workers": 1, "timeout_s": 20.0, **changes})
    pool = make_pool(section, CustomRewardSection(path=str(ROOT / "tests" / "support" / path)))
    try:
        yield pool
    finally:
        pool.close()


def results_of(pool: Pool, texts: Sequence[str], truth: Any = TRUTH) -> list[ScoringResult]:
    row = {"data_source": "code", "ground_truth": truth, "extra_info": {}}
    return pool.wait([pool.submit(pack(row | {"solution_str": text})) for text in texts])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[ScoringResult]]:
    """Of a right, a wrong and a nonsense response after each hostile one, and, as `nobody`, before all of them."""
    texts = [RIGHT, WRONG, NONSENSE]
    for hostile in HOSTILE.values():
        texts += [hostile, RIGHT, WRONG, NONSENSE]
    with pool_of("code_reward.py", timeout_s=3.0) as pool:
        found = results_of(pool, texts)
    after = {name: found[3 + 4 * place + 1 :][:3] for place, name in enumerate(HOSTILE)}
    return after | {"nobody": found[:3]}


def test_responses_have_their_scores_and_a_state() -> None:
    with pool_of("code_reward.py") as pool:
        right, wrong, nonsense = results_of(pool, [RIGHT, WRONG, NONSENSE])
    assert [result.numbers["score"] for result in (right, wrong, nonsense)] == [1.0, 0.0, 0.0]
    assert len(right.numbers) > 16


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_response_changes_the_score_of_another(hostile: str, outcomes: dict[str, list[ScoringResult]]) -> None:
    assert [result.detail for result in outcomes[hostile]] == ["", "", ""]
    assert [result.numbers for result in outcomes[hostile]] == [result.numbers for result in outcomes["nobody"]]


WITH_A_THREAD = """
import queue, threading
asked, answered = queue.Queue(), queue.Queue()
threading.Thread(target=lambda: [answered.put(len(asked.get())) for _ in range(9)], daemon=True).start()
def compute_score(solution_str, **_):
    asked.put(solution_str)
    return answered.get()
"""


GUARDS = {
    "processes": "import os\nos.fork = os.kill = os.killpg = os.system = os.getcwd = os.chdir = None",
    "the network": "import socket\nsocket.socket = None",
    "a blocking network": "import socket\nsocket.setdefaulttimeout(0.0)",
    "JSON": "import json\njson.dumps = json.loads = lambda *_, **__: b'{}'",
}


@pytest.mark.parametrize("isolation", ["response", "process"])
@pytest.mark.parametrize("guarded", GUARDS)
def test_file_may_replace_functions_of_standard_library(guarded: str, isolation: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"{GUARDS[guarded]}\ndef compute_score(**_): return 1.0\n")
    with closing(Pool(Rules(path=str(tmp_path / "own.py")), replace(LIMITS, isolation=isolation))) as pool:
        found = results_of(pool, [RIGHT, WRONG])
    assert [(result.numbers.get("score"), result.detail) for result in found] == [(1.0, "")] * 2


def test_file_cannot_name_another_process_as_its_own(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        (tmp_path / "own.py").write_text(
            f"import os, time\nos.getpid = lambda: {other.pid}\ndef compute_score(**_): time.sleep(1000)\n"
        )
        limits = replace(LIMITS, isolation="process", timeout_s=1.0)
        with closing(Pool(Rules(path=str(tmp_path / "own.py")), limits)) as pool:
            found = results_of(pool, [RIGHT, WRONG])
        is_running = other.poll() is None
        other.kill()
    assert [result.fault for result in found] == ["timeout"] * 2
    assert is_running


def test_file_starting_thread_is_advised_to_share_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_A_THREAD)
    with pool_of(str(tmp_path / "mine.py"), timeout_s=1.0) as pool:
        (late,) = results_of(pool, ["four"])
    assert late.fault == "timeout"
    assert late.detail.endswith("(start them in the call, or set reward_model.isolation=process)")
    with pool_of(str(tmp_path / "mine.py"), isolation="process", canary_every=0) as pool:
        assert results_of(pool, ["four"])[0].numbers == {"score": 4.0}


CHANGED = "a response has changed the reward: a wrong response earns 1 after 2 requests, and 0 in a new process"
REWARDS = {
    "a reward that a response changes": (
        "def compute_score(solution_str, **_):\n"
        "    global paid\n"
        "    paid = globals().get('paid') or solution_str == 'evil'\n"
        "    return float(paid)\n",
        [0.0, 1.0, None, 0.0],
    ),
    "a reward that takes less and less": (
        "seen = set()\n"
        "def compute_score(solution_str, **_):\n"
        "    new = solution_str not in seen\n"
        "    seen.add(solution_str)\n"
        "    return float(new)\n",
        [1.0, 1.0, 1.0, 0.0],
    ),
    "a reward that counts": (
        "calls = 0\ndef compute_score(**_):\n    global calls\n    calls += 1\n    return calls\n",
        [5.0, 6.0, 7.0, 8.0],
    ),
    "a reward that refuses wrong responses": (
        "def compute_score(solution_str, **_):\n    return float({'fine': 1, 'evil': 0, 'good': 1}[solution_str])\n",
        [1.0, 0.0, 1.0, 1.0],
    ),
    "a reward that varies": (
        "import itertools\n"
        "numbers = itertools.cycle([0, 0, 0, 0, 0, 0, 1, 0])\n"
        "def compute_score(solution_str, **_):\n"
        "    return float(next(numbers) if 'no response' in solution_str else 1.0)\n",
        [1.0, 1.0, 1.0, 1.0],
    ),
}


@pytest.mark.parametrize("name", REWARDS)
def test_canary_detects_only_responses_changing_reward(name: str, tmp_path: Path) -> None:
    source, expected = REWARDS[name]
    (tmp_path / "mine.py").write_text(source)
    with pool_of(str(tmp_path / "mine.py"), isolation="process", canary_every=1) as pool:
        found = [results_of(pool, [text])[0] for text in ("fine", "evil", "good", "fine")]
    assert [result.numbers.get("score") for result in found] == expected
    if None in expected:
        assert [(result.fault, result.detail) for result in found[2:3]] == [("canary", CHANGED)]


class Scripted:
    """A process that gives known scores, and then 0."""

    def __init__(self, scores: list[float | None]) -> None:
        self.scores = scores
        self.num_calls = 0

    def score_alone(self, sample: object) -> float | None:
        self.num_calls += 1
        return self.scores.pop(0) if self.scores else 0.0

    def end(self) -> None:
        """Lose nothing."""


@given(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=30))
@example([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
def test_the_calls_of_a_check_are_bounded(scores: list[float | None]) -> None:
    worker = Scripted(scores)
    canary = Canary(Rules(path="mine.py"), worker, every=1)
    for _ in range(3):
        before = worker.num_calls
        canary.fault(pack({"solution_str": "?"}))
        assert worker.num_calls - before <= MAX_CALLS


def test_canary_runs_at_interval_only_in_shared_process(tmp_path: Path) -> None:
    source, _ = REWARDS["a reward that a response changes"]
    (tmp_path / "mine.py").write_text(source)
    texts = ["fine", "evil", "good", "fine", "fine", "fine"]
    with pool_of(str(tmp_path / "mine.py"), isolation="process", canary_every=4) as pool:
        found = [results_of(pool, [text])[0] for text in texts]
    assert [result.fault for result in found] == [None, None, None, None, "canary", None]
    with pool_of(str(tmp_path / "mine.py"), canary_every=1) as pool:
        found = [results_of(pool, [text])[0] for text in texts]
    assert [result.numbers["score"] for result in found] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_reward_may_call_its_function_in_child_processes(method: str) -> None:
    with pool_of("spawning_reward.py", timeout_s=100.0) as pool:
        (found,) = results_of(pool, ["four"], truth=method)
    assert (found.numbers.get("score"), found.detail) == (4.0, "")


ANSWERS = {
    "gsm8k": ("18", ["#### 18", "#### 17", "18", ""]),
    "countdown": ({"target": 8, "numbers": [3, 5]}, ["<answer>3+5</answer>", "<answer>5-3</answer>", "3+5"]),
    "math": (
        "5",
        [
            r"\boxed{5}",
            r"\boxed{x = 5}",
            r"\boxed{x}",
            r"\boxed{\pi = 5}",
            r"\boxed{\pi}",
            r"\boxed{\frac{10}{2}}",
            r"\boxed{i^2 = 5, e = 5}",
            r"\boxed{f(x) = 5}",
            r"\boxed{\{5, 6\}}",
            r"\boxed{1/0}",
            r"\boxed{)(}",
        ],
    ),
    "math_dapo": ("5", ["Answer: 5", "Answer: x=5", "Answer: 6"]),
    "multiply": ("56", ["<answer>56</answer>", "<answer>57</answer>", "7 * 8 = 56"]),
}


def test_built_in_rules_share_process_without_changing_scores() -> None:
    """Each response gets, after all others in any order, the score that it gets in a new process."""
    rows = [
        {"data_source": source, "ground_truth": truth, "extra_info": {}, "solution_str": text}
        for source, (truth, texts) in ANSWERS.items()
        for text in texts
    ]
    alone = WorkerLimits(num_workers=1, timeout_s=100.0, max_memory=4_000_000_000)
    together = replace(alone, isolation="process")
    scores = []
    for limits, asked in ((alone, rows), (together, rows), (together, rows[::-1])):
        pool = Pool(Rules(), limits)
        found = pool.wait([pool.submit(pack(row)) for row in asked])
        pool.close()
        scores.append([(result.numbers, result.pred, result.fault) for result in found])
    assert scores[0] == scores[1] == scores[2][::-1]
    assert {numbers.get("score") for numbers, _, _ in scores[0]} >= {0.0, 1.0}


def test_fork_for_response_copies_few_modules() -> None:
    """Each of these does work in every fork, or is large."""
    costly = [
        "asyncio",
        "importlib.metadata",
        "logging",
        "megarl.rewards.math",
        "numpy",
        "random",
        "threading",
        "torch",
    ]
    program = f"import sys, megarl.rewards.supervisor; print([name for name in {costly} if name in sys.modules])"
    assert succeed(sys.executable, "-c", program, timeout_s=60.0) == "[]\n"
