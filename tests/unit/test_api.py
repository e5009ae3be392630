"""`import megarl` from a program: functions and rows become files, and nothing heavy is imported."""

import inspect
import linecache
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pandas import DataFrame

import megarl
from megarl.api.rows import data_files
from megarl.api.source import reward_file
from megarl.platform.errors import UserError
from megarl.platform.functions import load_module

ROWS = [{"question": f"{number} + 1 =", "total": str(number + 1)} for number in range(30)]
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
        ("client = object()\ndef reward(**_):\n    return bool(client)", "uses client, a object that no file can hold"),
    ],
)
def test_function_that_no_file_can_hold_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        reward_file(cell(text)["reward"], tmp_path)


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
    assert data_files(file, tmp_path, prompt="prompt", answer=None, plain=False) == {"train": file}


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
    assert all(fault.startswith("TypeError: ") and fault.endswith("reward.py:2)") for fault in faults)


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
