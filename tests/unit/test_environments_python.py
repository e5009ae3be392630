"""Programs of the policy: what they print, how they are bounded, and what they are not told."""

import subprocess
import time
from pathlib import Path

import pytest

from megarl.environments.host import Host
from megarl.environments.protocol import Row, Step
from megarl.environments.python import Python
from megarl.sandbox.pool import Pool, WorkerLimits
from megarl.sandbox.wire import pack

ROW = Row(prompt="p", data_source="gsm8k/flexible", ground_truth="42", extra_info={}, index=5, seed=1)


def run(program: str, **options: float) -> str:
    environment = Python(**options)  # type: ignore[arg-type]
    environment.reset(ROW)
    said, reward, done = environment.step(f"I try\n```python\n{program}\n```\nand see.")
    assert isinstance(said, str)
    assert (reward, done) == (0.0, False)
    return said


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print(6 * 7)", "42"),
        ("pass", "(no output)"),
        ("import os; os.abort()", "(ended by signal 6)"),
        ("print(object())", "<object object at 0x0>"),
        ("print(hash('a') == hash('a'), input())", "EOFError: EOF when reading a line"),
    ],
)
def test_a_program_says_what_it_prints(program: str, said: str) -> None:
    assert run(program).endswith(said)


@pytest.mark.parametrize(("most", "said"), [(0, "(no output)"), (2, "23"), (9, "123")])
def test_the_end_of_an_output_is_shown(most: int, said: str) -> None:
    assert run("print(123, end='')", max_output=most) == said


def test_answer_is_scored_by_rule_of_row() -> None:
    environment = Python()
    environment.reset(ROW)
    assert environment.step("<answer>42</answer>") == Step(None, 1.0, done=True)
    assert environment.step("42?") == Step("no program: write it between ```python and ```", 0.0, done=False)
    with pytest.raises(ValueError, match="no built-in reward for data source 'mine'"):
        environment.reset(Row(prompt="p", data_source="mine", ground_truth="", extra_info={}, index=0, seed=0))


@pytest.mark.parametrize(
    "replace",
    [
        "os.mkfifo('printed')",
        "os.symlink('/proc/self/environ', 'printed')",
        "os.symlink(f'/proc/{os.getppid()}/environ', 'printed')",
        "os.mkdir('printed')",
        "os.unlink('printed')",
        "os.rmdir(os.getcwd())",
        "os.chmod('.', 0)",
        "os.ftruncate(1, 0)",
        "os.lseek(1, 1000, 0)",
        "os.set_blocking(1, False)",
        "os.close(1); os.close(2)",
    ],
)
def test_program_cannot_replace_its_output_file(replace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "the-secret-of-the-run")
    program = f"""
import os
print("before", flush=True)
for name in ("printed", *os.listdir()):
    try:
        {replace}
    except OSError:
        pass
try:
    print("after", flush=True)
except (OSError, ValueError):
    pass
os._exit(0)
"""
    said = run(program, seconds=30.0)
    assert {*said.replace(chr(0), "").split()} <= {"before", "after", "(no", "output)"}
    assert "after" in said or "close" in replace


def test_equal_programs_say_equal_things() -> None:
    program = "print({'a', 'b', 'c', 'd'}, hash('x'), lambda: 0)"
    assert run(program) == run(program)


def test_programs_are_bounded_and_know_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os; print('HF_TOKEN' in os.environ)") == "False"
    assert run("while True: pass", seconds=1.0) == "(stopped after 1 s)"
    assert run("import time; print('x', flush=True); time.sleep(60)", seconds=1.0) == "x\n(stopped after 1 s)"
    assert len(run("while True: print('x' * 1000)", seconds=9.0)) == 1000
    assert run("open('big', 'wb').write(bytes(1 << 22))").endswith("File too large")


def test_a_program_leaves_no_process_and_no_file() -> None:
    program = (
        "import os, subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, os.getcwd())"
    )
    pid, directory = run(program).strip().split(maxsplit=1)
    deadline = time.monotonic() + 60
    while "sleep(600)" in subprocess.run(["ps", "-o", "args=", "-p", pid], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, "the process is still there"
    assert not Path(directory).exists()
    assert str(Path.cwd()) != directory


def test_memory_is_bounded_in_the_processes_of_environments() -> None:
    pool = Pool(
        Host(name="python"),
        WorkerLimits(num_workers=1, timeout_s=30.0, max_memory=1 << 29, isolation="process"),
    )
    row = {"prompt": "p", "ground_truth": "42", "extra_info": {}, "index": 0, "seed": 1}
    said = ["```python\nprint(len(bytes(1 << 30)))\n```", "```python\nprint(2)\n```"]
    try:
        for response, expected in zip(said, ("MemoryError", "2"), strict=True):
            request = {"data_source": "gsm8k", "row": row, "episode": "1", "responses": [response], "observations": []}
            [result] = pool.wait([pool.submit(pack(request))])
            assert result.pred and expected in result.pred
    finally:
        pool.close()
