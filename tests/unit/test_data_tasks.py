"""Data of `multiply`, `math`, `svamp` and `knights_knaves`, and what `--check` says about a file."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import pytest

from examples.tasks.knights_knaves import Claim, solutions
from megarl.commands import prepare as command
from megarl.commands.cli.table import PREPARE
from megarl.data.parquet import write_rows
from megarl.data.prepare.check import READERS, faults
from megarl.rewards.built_in import RULES
from megarl.rewards.config import CustomRewardSection


def prepare(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    monkeypatch.setattr("sys.argv", ["prepare", *options, "--out", str(out)])
    command.main()
    splits = {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}
    assert [fault for path in out.glob("*.parquet") for fault in faults(str(path))] == []
    return splits


def reward(row: dict[str, Any], response: str) -> float:
    return RULES[row["data_source"]].score(row["data_source"], response, row["reward_model"]["ground_truth"], {})


def test_multiply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    splits = prepare(monkeypatch, tmp_path / "a", "multiply", "--train", "60", "--val", "21", "--digits", "1")
    prompts = [row["prompt"][0]["content"] for rows in splits.values() for row in rows]
    factors = [re.match(r"What is ([0-9]+) \* ([0-9]+)\?", prompt).groups() for prompt in prompts]  # type: ignore[union-attr]
    assert sorted(factors) == sorted(itertools.product("123456789", repeat=2))  # every problem that exists, once
    for row, (a, b) in zip(itertools.chain.from_iterable(splits.values()), factors, strict=True):
        assert row["reward_model"]["ground_truth"] == int(a) * int(b)
        assert reward(row, f"<answer>{int(a) * int(b)}</answer>") == 1.0
    more = prepare(monkeypatch, tmp_path / "b", "multiply", "--train", "30", "--val", "21", "--digits", "1")
    assert more["val"] == splits["val"]
    plain = prepare(monkeypatch, tmp_path / "c", "multiply", "--train", "1", "--val", "1", "--template", "plain")
    assert re.fullmatch(r"[1-9][0-9]{2} \* [1-9][0-9]{2} =", plain["val"][0]["prompt"])


def test_multiply_that_asks_for_too_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, "multiply", "--train", "100", "--digits", "1")
    assert "only 81 problems exist, 356 were asked for: raise --digits" in capsys.readouterr().err


def test_the_classical_puzzle_of_two_knaves() -> None:
    # A: "A and B are knaves." B says that A is a knave. A knight would lie, so A is a knave and B tells the truth.
    both = Claim(kind="and", people=(0, 1), knights=(False, False))
    assert solutions([both, Claim(kind="is", people=(0,), knights=(False,))]) == [(False, True)]
    # two people accuse each other: exactly one is right
    accuse = [Claim(kind="is", people=(1,), knights=(False,)), Claim(kind="is", people=(0,), knights=(False,))]
    assert solutions(accuse) == [(True, False), (False, True)]
    # "A is like B" from A makes B a knight, whatever A is; then B's "both are knights" makes A one too
    same = Claim(kind="same", people=(0, 1), knights=())
    assert solutions([same, Claim(kind="or", people=(0, 1), knights=(True, True))]) == [(True, True), (False, True)]
    assert solutions([same, Claim(kind="and", people=(0, 1), knights=(True, True))]) == [(True, True)]
    assert both.text(["Ava", "Ben"]) == "Ava is a knave and Ben is a knave"


def told(statement: str, world: dict[str, bool]) -> bool:
    """Read a statement from its words by brute force."""
    left, word, right = re.fullmatch(r"(.*?)(?: (and|or|if and only if) (.*))?", statement).groups()  # type: ignore[union-attr]

    def simple(text: str) -> bool:
        name, _, _, role = text.split()
        return world[name] == (role == "knight")

    if word is None:
        return simple(left)
    results = {"and": simple(left) and simple(right), "or": simple(left) or simple(right)}
    return results.get(word, simple(left) == simple(right))


def test_knights_and_knaves_have_one_solution_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--train", "40", "--val", "10", "--num-people", "2", "3", "4")
    splits = prepare(monkeypatch, tmp_path, "knights-knaves", *options)
    rows = [row for part in splits.values() for row in part]
    assert len({row["prompt"][0]["content"] for row in rows}) == 50
    for row in rows:
        said = re.findall(r'(\w+) says: "([^"]*)\."', row["prompt"][0]["content"])
        names, truth = row["reward_model"]["ground_truth"]["names"], row["reward_model"]["ground_truth"]["is_knight"]
        worlds = [dict(zip(names, roles, strict=True)) for roles in itertools.product((True, False), repeat=len(names))]
        fitting = [world for world in worlds if all(told(text, world) == world[name] for name, text in said)]
        assert fitting == [dict(zip(names, truth, strict=True))]
        answer = ", ".join(f"{name} is a {'knight' if fitting[0][name] else 'knave'}" for name in names)
        assert reward(row, f"<answer>{answer}</answer>") == 1.0


def test_knights_and_knaves_that_ask_for_too_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, "knights-knaves", "--num-people", "11")
    assert "--num-people [11]: give 2 to 10" in capsys.readouterr().err


SOLUTION = r"We have $\boxed{\frac{1}{2}}$."
MATH = {"problem": "What is $1/2$?", "level": "Level 1", "type": "Algebra", "solution": SOLUTION}


def test_math_in_its_published_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for split, topic, name in (("train", "algebra", "1"), ("train", "geometry", "2"), ("test", "algebra", "3")):
        path = tmp_path / "MATH" / split / topic / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(MATH))
    splits = prepare(monkeypatch, tmp_path / "out", "math", "--from", str(tmp_path / "MATH"))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 2, "val": 1}
    row = splits["val"][0]
    assert row["prompt"][0]["content"].startswith("What is $1/2$? Let's think")
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["extra_info"] == {"split": "val", "index": 0, "level": "Level 1", "type": "Algebra", "answer": SOLUTION}
    assert reward(row, SOLUTION) == reward(row, r"\boxed{0.5}") == 1.0


def test_svamp_in_its_published_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem = {"ID": "chal-1", "Body": "Ed has 8 pens", "Question": "How many pens?", "Answer": 10.0, "Type": "Sum"}
    (tmp_path / "SVAMP.json").write_text(json.dumps([problem, problem | {"Body": "Two. ", "Answer": "2.50"}]))
    options = ("--from", str(tmp_path / "SVAMP.json"), "--extraction", "flexible")
    rows = prepare(monkeypatch, tmp_path / "out", "svamp", *options)["train"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["10", "2.5"]
    assert rows[0]["prompt"][0]["content"].startswith("Ed has 8 pens. How many pens? Let's think")
    assert rows[1]["prompt"][0]["content"].startswith("Two. How many pens?")
    assert reward(rows[0], "10 pens") == 1.0


@pytest.mark.parametrize(
    ("task", "name", "text", "message"),
    [
        ("math", "a.jsonl", '{"problem": "1?", "solution": "1"}', "a.jsonl, row 0: a MATH problem has"),
        ("svamp", "a.json", '[{"Body": "x", "Question": "y", "Answer": "z"}]', "a.json, row 0: a SVAMP problem has"),
        ("svamp", "a.json", "[1]", "a.json, row 0: a problem is an object"),
        ("math", "a.jsonl", "{", "a.jsonl cannot be read"),
        ("math", "a.parquet", "x", "a.parquet cannot be read"),
    ],
)
def test_files_of_another_format_are_named(
    task: str,
    name: str,
    text: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "out", task, "--from", str(tmp_path / name))
    assert message in capsys.readouterr().err


def row(**changes: Any) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": "5"}
    return {"data_source": "gsm8k", "prompt": "2+3?", "reward_model": truth, "extra_info": {"index": 0}} | changes


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prompt": ""}, "prompt: the text is empty"),
        ({"prompt": 5}, "prompt: 5 is neither a text nor a list"),
        ({"prompt": [{"role": "user"}]}, "prompt: message 0: content: a text is expected, not None"),
        (
            {"prompt": [{"role": "me", "content": "x"}]},
            "prompt: message 0: role 'me' is none of system, developer, user",
        ),
        ({"data_source": ""}, "data_source: '' is not a text"),
        ({"data_source": "sudoku"}, "data_source: no built-in reward for data source 'sudoku' ("),
        ({"reward_model": {"style": "rule"}}, "reward_model: {'style': 'rule'} has no ground_truth"),
        ({"reward_model": {"style": "rule", "ground_truth": "five"}}, "reward_model.ground_truth: 'five' does not"),
        ({"data_source": "countdown"}, "reward_model.ground_truth: '5' does not fit the reward of 'countdown'"),
        (
            {"data_source": "countdown", "reward_model": {"ground_truth": {"target": "five", "numbers": [2, 3]}}},
            "reward_model.ground_truth: {'target': 'five', 'numbers': [2, 3]} does not fit the reward of 'countdown'",
        ),
        (
            {"data_source": "countdown/bare", "reward_model": {"ground_truth": {"target": 5, "numbers": ["two"]}}},
            "reward_model.ground_truth: {'target': 5, 'numbers': ['two']} does not fit the reward of 'countdown/bare'",
        ),
        ({"extra_info": "x"}, "extra_info: the text 'x' is not JSON"),
    ],
)
def test_a_fault_is_explained(changes: dict[str, Any], fault: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [row(**changes)])
    (found,) = faults(str(path))
    assert found.startswith(f"{path}, row 0, {fault}")


def check(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["prepare", *options])
    try:
        command.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_counts_faults_and_names_their_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [row(prompt="" if index >= 2 else "2+3?", data_source=f"{index}") for index in range(25)])
    assert check(monkeypatch, "--check", str(path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"{path}, row 2 and 22 more, prompt: the text is empty"
    assert lines[20:] == ["... and 6 more"]
    write_rows(path, [row(), row()])
    assert check(monkeypatch, "--check", str(path)) == 0
    assert "no faults" in capsys.readouterr().out
    write_rows(path, [{"prompt": "2+3?"}])
    assert check(monkeypatch, "--check", str(path)) == 1
    assert "has no column 'data_source' (data.reward_fn_key" in capsys.readouterr().out
    assert check(monkeypatch, "--check", str(tmp_path / "none")) == 1
    assert check(monkeypatch) == 2


def test_a_misspelt_task_is_corrected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(monkeypatch, "contdown") == 2
    assert "there is no task 'contdown': did you mean 'countdown'?" in capsys.readouterr().err
    assert check(monkeypatch, "zzz") == 2
    assert "choose from 'countdown', " in capsys.readouterr().err


def test_check_command_accepts_scorer_and_column_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines := tmp_path / "mine.jsonl").write_text('{"question": "2+3?"}\n{"question": ""}\n')
    (own := tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): ..."
    )
    assert check(monkeypatch, "--check", str(lines)) == 1
    assert "no column 'prompt' (data.prompt_key names another), 'data_source'" in capsys.readouterr().out
    for scored in (["--custom-reward-function", str(own)], ["--reward-model"]):
        assert check(monkeypatch, "--check", str(lines), "--prompt-key", "question", *scored) == 1
        assert capsys.readouterr().out == f"{lines}, line 2, question: the text is empty\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a task (countdown, gsm8k"),
        (["countdown", "--check", "a.parquet"], "No such option"),
        (["--check", "a.parquet", "countdown", "--out", "o"], "or a file to --check"),
        (["countdown"], "Missing option '--out' / '--output'"),
        (["countdown", "--out", "o", "--num-numbers"], "Option '--num-numbers' requires an argument"),
        (["countdown", "--out", "o", "--template", "odd"], "'odd' is not one of 'plain', 'base', 'qwen-instruct'"),
        (["own", "--out", "o"], "Missing argument 'FILE...'"),
    ],
)
def test_words_that_do_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        command.main(words)
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_option_takes_values_up_to_the_next() -> None:
    words = ["countdown", "--num-numbers", "3", "4", "--output", "o", "--seed=2", "--num-numbers", "5"]
    arguments, task = command.read_words(words)
    assert task is command.TASKS["countdown"]
    assert (arguments.num_numbers, arguments.out, arguments.seed, arguments.val) == ([3, 4, 5], Path("o"), 2, 256)


def test_check_has_the_defaults_of_a_run() -> None:
    arguments, task = command.read_words(["--check", "a.parquet", "--reward-kwarg", "a", "--reward-kwarg", "b"])
    assert task is None and list(arguments.reward_kwarg) == ["a", "b"]
    assert arguments.custom_reward_name == CustomRewardSection.name
    (kind,) = [param for param in PREPARE.params if param.name == "kind"]
    assert isinstance(kind.type, click.Choice) and list(kind.type.choices) == list(READERS)
