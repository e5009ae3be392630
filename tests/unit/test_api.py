"""`import megarl` from a program: functions and rows become files, and nothing heavy is imported."""

import fcntl
import functools
import inspect
import json
import linecache
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from pandas import DataFrame, Timestamp

import megarl
from megarl.api.rows import data_files
from megarl.api.source import reward_file
from megarl.platform.errors import UserError
from megarl.platform.functions import load_module

ROWS = [{"question": f"{number} + 1 =", "total": str(number + 1)} for number in range(30)]
DEEP: list[Any] = reduce(lambda inner, _: [inner], range(10_000), [])
CELL = """
import re as regex
import math
from collections import Counter
BONUS = {"right": 1.0, "wrong": 0.25}
UNUSED = object()

def numbers(text):
    return [math.floor(float(found)) for found in regex.findall(r"[0-9]+", text)]

def reward(data_source, solution_str, ground_truth, extra_info):
    print("scores", solution_str)
    found = Counter(numbers(solution_str))
    return BONUS["right" if found[int(ground_truth)] else "wrong"]
"""


def cell(text: str, **values: object) -> dict[str, Any]:
    """Return the names that the cell of a notebook defines."""
    name = f"<cell-{abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "__main__", **values}
    exec(compile(text, name, "exec"), names)  # noqa: S102 - a notebook does that
    return names


def test_notebook_function_becomes_a_file(tmp_path: Path) -> None:
    reward = cell(CELL)["reward"]
    file, name = reward_file(reward, tmp_path)
    assert (file, name) == (tmp_path / "reward.py", "reward")
    assert "UNUSED" not in file.read_text()
    again = getattr(load_module(file, key="reward"), name)
    for solution, expected in (("it is 12", 1.0), ("it is 13", 0.25)):
        assert again("", solution, "12", {}) == reward("", solution, "12", {}) == expected


DECORATED = """
import functools
from collections.abc import Mapping
LEAST = float("-inf")

def halved(function):
    @functools.wraps(function)
    def call(**arguments):
        return max(LEAST, function(**arguments) / 2)
    return call

@functools.lru_cache
def length(text):
    return len(text)

@halved
def reward(solution_str, extra: Mapping = None, least=LEAST, **_) -> float:
    return float(length(solution_str))
"""


def test_decorators_defaults_and_annotations_are_written_too(tmp_path: Path) -> None:
    file, name = reward_file(cell(DECORATED)["reward"], tmp_path)
    assert getattr(load_module(file, key="reward"), name)(solution_str="four") == 2.0


@pytest.mark.parametrize("reward", [print, math.sqrt, 3])
def test_reward_without_a_source_is_refused(reward: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no function that `def` has named"):
        reward_file(reward, tmp_path)


def test_function_of_a_module_stays_in_its_file(tmp_path: Path) -> None:
    file, name = reward_file(inspect.cleandoc, tmp_path)
    assert (file, name) == (Path(inspect.__file__), "cleandoc")
    assert reward_file(tmp_path / "mine.py", tmp_path) == (tmp_path / "mine.py", None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reward = lambda **_: 1.0", "is no function that `def` has named"),
        ("def make(k):\n    def reward(**_):\n        return k\n    return reward\nreward = make(1)", "uses k of the"),
        ("def f(**_): return 1\nreward = functools.partial(f)", "is no function that `def` has named"),
        ("class C:\n    def __call__(self, **_): return 1\nreward = C()", "is no function that `def` has named"),
        ("def f(**_): return 1\nreward = functools.lru_cache(f)", "f is wrapped by a call"),
        ("client = object()\ndef reward(**_):\n    return bool(client)", "uses client, a object that no file can hold"),
    ],
)
def test_function_that_no_file_can_hold_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        reward_file(cell(text, functools=functools)["reward"], tmp_path)


@pytest.mark.parametrize("kind", [list, DataFrame, "csv"])
def test_rows_of_a_program_become_files(kind: Callable[..., Any] | str, tmp_path: Path) -> None:
    if isinstance(kind, str):
        data: Any = tmp_path / "rows.csv"
        DataFrame(ROWS).to_csv(data, index=False)
    else:
        data = kind(ROWS)
    files = data_files(data, tmp_path, prompt="question", answer="total", plain=True)
    rows = [row for file in files.values() for row in pq.read_table(file).to_pylist()]
    assert Counter(row["prompt"] for row in rows) == Counter(row["question"] for row in ROWS)
    assert {row["prompt"]: row["reward_model"]["ground_truth"] for row in rows} == {
        row["question"]: row["total"] for row in ROWS
    }
    assert files.keys() == {"train", "val"}


def test_prepared_file_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    assert data_files(file, tmp_path, prompt="prompt", answer=None, plain=False) == {"train": str(file)}
    place = "s3://bucket/train.parquet"
    assert data_files(place, tmp_path, prompt="prompt", answer=None, plain=False) == {"train": place}


CHAT = [{"role": "user", "content": "1 + 1 ="}]


@pytest.mark.parametrize(
    ("data", "prompt", "truth"),
    [
        (DataFrame({"q": [np.array(CHAT, dtype=object)] * 2, "a": ["1", "2"]}), CHAT, "2"),  # as pandas reads parquet
        (DataFrame({"q": ["x", "y"], "a": [1.0, np.nan]}), "y", None),
        (DataFrame({"q": ["x", "y"], "a": [None, Timestamp("2020-01-02")]}), "y", "2020-01-02T00:00:00"),
        ([{"q": "x", "a": np.int64(1)}, {"q": "y", "a": np.int64(2)}], "y", 2),
        ([{"q": CHAT, "a": "1"}, {"q": CHAT, "a": "2", "image": object()}], CHAT, "2"),
        ((row for row in [{"q": "x", "a": [1]}, {"q": "y", "a": [2]}]), "y", [2]),
    ],
)
def test_values_of_notebooks_become_rows(data: Any, prompt: Any, truth: Any, tmp_path: Path) -> None:
    files = data_files(data, tmp_path, prompt="q", answer="a", plain=True)
    row = pq.read_table(files["train"]).to_pylist()[1]
    assert (row["prompt"], row["reward_model"]["ground_truth"]) == (prompt, truth)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "data is None: give a file"),
        ({"train": ROWS, "test": ROWS}, "data is a mapping with train, test, not rows"),
        (["1 + 1"], "data: row 0 is '1 + 1', no mapping of columns"),
        ([ROWS[0], ROWS[0] | {"total": {1}}], "data: row 1: {1} is neither a text"),
        ([ROWS[0], ROWS[0] | {"total": DEEP}], "data: row 1: maximum recursion depth exceeded"),
        ([], "is empty"),
    ],
)
def test_data_without_rows_are_refused(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        data_files(data, tmp_path, prompt="question", answer="total", plain=True)


def test_columns_that_are_kept_reach_the_reward() -> None:
    reward = cell("def reward(extra_info, **_):\n    return extra_info['level']\n")["reward"]
    rows = [row | {"level": 7} for row in ROWS]
    trials = megarl.score(reward, rows, prompt="question", answer="total", keep=["level"], n=3)
    assert [trial.score for trial in trials] == [7.0] * 3


def test_built_in_reward_is_named_by_its_source() -> None:
    rows = [{"q": "3 x 4", "a": "12"}]
    (trial,) = megarl.score(None, rows, prompt="q", answer="a", data_source="multiply", n=1)
    assert trial.score == 1.0


def test_scores_and_printed_text_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    trials = megarl.score(cell(CELL)["reward"], ROWS, prompt="question", answer="total", n=4)
    assert [trial.score for trial in trials] == [1.0] * 4
    assert [trial.fault for trial in trials] == [None] * 4
    printed = capsys.readouterr().err
    assert all(f"INFO rank 0: scores {trial.response}\n" in printed for trial in trials)


def test_failing_reward_names_its_line() -> None:
    text = "def reward(solution_str, **_):\n    return solution_str['score']\n"
    trials = megarl.score(cell(text)["reward"], ROWS, prompt="question", answer="total", n=2)
    faults = [trial.fault for trial in trials if trial.fault]
    assert faults
    line = "reward.py:2, `return solution_str['score']`)"  # the file is gone when a person reads this
    assert any(fault.startswith("TypeError: ") and fault.endswith(line) for fault in faults)
    assert len(faults) == len(trials), "a row that nobody waited for has a fault too"


def test_check_returns_all_faults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: none.parquet}\ntrainer: {nnode: 1}\n")
    faults = megarl.check(file, set={"actor_rollout_ref.model.path": str(tmp_path / "model"), "critic.optim.lr": "x"})
    assert {"trainer.nnode", "data.train_files", "critic.optim.lr"} <= {fault.path for fault in faults}


def test_faulty_training_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a HF directory"):
        megarl.train(
            model=tmp_path / "model", data=ROWS, prompt="question", answer="total", reward=cell(CELL)["reward"],
            out=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run" / "log").exists()


@pytest.mark.parametrize("content", ["{", "[]", "", "\xff"])
def test_damaged_tokenizer_settings_are_named(content: str, tmp_path: Path) -> None:
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.parent.mkdir()
    settings.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=f"{settings} is damaged"):
        megarl.train(
            model=settings.parent, data=ROWS, prompt="question", answer="total", reward=cell(CELL)["reward"],
            out=tmp_path / "run",
        )  # fmt: skip


def test_keys_of_a_program_are_written_as_yaml(tmp_path: Path) -> None:
    keys = {"trainer.default_local_dir": tmp_path / "😀", "actor_rollout_ref.actor.optim.lr": np.float64(1e-6)}
    wrong = {fault.path for fault in megarl.check(set=keys)}
    assert not wrong & keys.keys()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`megarl.train` that starts no process, and gives the configuration that it has written."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr("megarl.api.train.start_detached", lambda *_: None)
    monkeypatch.setattr("megarl.api.train.load_config", lambda files, **_: read_config(files[0]))

    def read_config(file: str) -> Any:
        tree = yaml.safe_load(Path(file).read_text())
        return SimpleNamespace(trainer=SimpleNamespace(**tree["trainer"]), tree=tree)

    def start(**arguments: Any) -> Any:
        usual = {
            "model": tmp_path / "model",
            "data": ROWS,
            "prompt": "question",
            "answer": "total",
            "reward": CELL_FILE,
        }
        out = tmp_path / "run"
        megarl.train(**{**usual, "out": out, **arguments})
        return read_config(str(out / "inputs" / "config.yaml")).tree

    return start


CELL_FILE = Path(__file__)


def test_few_rows_train_without_validation(started: Callable[..., Any]) -> None:
    assert started(data=ROWS[:5])["trainer"]["test_freq"] == -1
    assert started()["trainer"]["test_freq"] == 10


def test_sections_that_are_set_keep_other_keys(started: Callable[..., Any], tmp_path: Path) -> None:
    trainer = started(set={"trainer": {"save_freq": np.int64(3)}, "trainer.test_freq": 2})["trainer"]
    assert (trainer["save_freq"], trainer["test_freq"]) == (3, 2)
    assert trainer["default_local_dir"] == str(tmp_path / "run")
    with pytest.raises(UserError, match="name the directory of the run by `out`"):
        started(set={"trainer.default_local_dir": tmp_path / "other"})
    late = started(set={"trainer.test_freq": 2, "trainer": {"save_freq": 3}})["trainer"]
    assert (late["save_freq"], late["test_freq"]) == (3, 2)


def test_faulty_training_leaves_the_inputs_of_a_run(started: Callable[..., Any], tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "run" / "inputs").iterdir()}

    started()
    before = contents()
    with pytest.raises(UserError, match="name the directory of the run by `out`"):
        started(data=ROWS[:9], steps=7, set={"trainer.default_local_dir": tmp_path / "other"})
    assert contents() == before
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["inputs"]


def test_resumption_is_reported(
    started: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started()
    assert "note:" not in capsys.readouterr().err
    (tmp_path / "run" / "global_step_20").mkdir()
    started()
    assert "continues after step 20; name another `out` to start anew" in capsys.readouterr().err
    started(steps=20)
    assert "is at step 20 of 20: nothing is left to do" in capsys.readouterr().err


def test_inputs_of_a_job_at_work_stay(started: Callable[..., Any], tmp_path: Path) -> None:
    started()
    before = (tmp_path / "run" / "inputs" / "rows.jsonl").read_bytes()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        lock.write("process 7 on here")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="process 7 on here trains there"):
            started(data=ROWS[:5])
    assert (tmp_path / "run" / "inputs" / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize("out", ["/proc/none/run", __file__])
def test_place_that_takes_no_files_is_named(out: str, started: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=f"out={out}.* cannot be written"):
        started(out=out)


def test_run_that_died_is_not_awaited(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    status = {"state": "running", "time": time.time() - 100, "step": 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    run = megarl.load_run(tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.is_running()
    assert not run.is_running()
    with pytest.raises(UserError, match="has died"):
        run.wait()


HOLD = """
import fcntl, signal, sys, time
lock = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(f"process {__import__('os').getpid()} on here", file=lock, flush=True)
status = open(sys.argv[1] + "/status.json", "r+")
def end(*_):
    status.write('{"state": "stopped", "time": 0}')
    status.truncate()
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("holds", flush=True)
time.sleep(60)
"""


def test_run_of_another_program_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"state": "running", "time": time.time()}))
    run = megarl.load_run(tmp_path)
    with pytest.raises(UserError, match="an unknown process trains in"):
        run.stop()
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"holds\n"
        assert run.stop() is run
        assert holder.wait() == 0
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    status.write_text(json.dumps({"state": "running", "time": time.time()}))
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="process 1 on elsewhere trains in .*: stop it there"):
            run.stop()


def test_run_that_starts_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    run = megarl.load_run(tmp_path)
    assert (len(run.metrics), len(run.samples)) == (0, 0)
    with pytest.raises(UserError, match="nothing is recorded yet: the run starts"):
        run.report()


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the directory of a run"):
        megarl.load_run(tmp_path)


def test_import_is_light_and_complete() -> None:
    program = (
        "import sys, megarl; light = {*sys.modules}; assert set(megarl.__all__) <= set(dir(megarl)); "
        "[getattr(megarl, name) for name in megarl.__all__]; heavy = {'torch', 'megatron', 'vllm', 'transformers'}; "
        "assert not heavy & sys.modules.keys(); assert 'pyarrow' not in light; "
        "assert not hasattr(megarl, 'trian')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_command_called_from_a_program_forks_nothing(tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text(
        "from megarl.commands.train import main\n"
        "try:\n"
        "    main(['trainer.nnode=1'])\n"
        "except SystemExit as ending:\n"
        "    print('ended with', ending.code)\n"
        "print('goes on')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["ended with 2", "goes on"]
    assert done.stderr.count("did you mean trainer.nnodes?") == 1
    assert "EOFError" not in done.stderr


def test_error_of_a_command_has_what_it_printed() -> None:
    with pytest.raises(UserError, match=r"megarl plan ended with code 2; it printed(?s:.*)no such file"):
        megarl.plan("/nowhere.yaml")
