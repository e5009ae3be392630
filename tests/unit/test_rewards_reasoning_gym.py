"""reasoning-gym: prepared by name, scored by its own rules, won by no constant, and no response is ever run as code."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.commands.prepare import main
from megarl.data.prepare import check
from megarl.rewards.built_in import rule_of
from megarl.rewards.reasoning_gym import REFUSED, compute_score, from_json, load_task, to_json

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")

HOSTILE = (
    "__import__('os').mkdir({path!r})",
    "[x for x in (1).__class__.__base__.__subclasses__()]",
    "9**9**9",
    "(" * 500,
)
CONSTANTS = (
    "nan",
    "0",
    "1",
    "-1",
    "0.5",
    "inf",
    "1e999",
    "",
    "banana",
    "A",
    "Yes",
    "None",
    "True",
    "False",
    "[]",
    "{}",
    "()",
)
NUM_PROBLEMS = 16
SLOW = {"knight_swap": 2}  # tasks that take seconds to make a problem
UNEARNED = 0.5
"""The score that a constant may get on average, beyond the share of problems whose own answer it is:
`True` may be right by chance. Some tasks give a part of a point for what is nearly right, the most of it
polynomial_equations: 0.4 for `0`."""
FACTORY = importlib.import_module("reasoning_gym.factory")
SCORE_EVERYTHING = """
import json, sys
from reasoning_gym.factory import DATASETS
from megarl.rewards.reasoning_gym import SOURCE_PREFIX, REFUSED, compute_score, load_task, to_json

ran, scored = [], 0
armed = False
def watch(event, args):
    if armed and event in ("exec", "compile", "os.system", "subprocess.Popen", "os.mkdir"):
        ran.append((name, event))
sys.addaudithook(watch)
for name in sorted(DATASETS.keys() - REFUSED.keys()):
    task = load_task(name, json.dumps({"seed": 1, "size": 2}))
    problem = task[0]
    info = {"config": "{}", "metadata": to_json(problem["metadata"])}
    for answer in (str(problem["answer"]), *sys.argv[1:]):
        for armed in (False, True):  # a scorer imports modules at its first call
            try:
                compute_score(SOURCE_PREFIX + name, f"<answer>{answer}</answer>", problem["answer"], info)
            except Exception:
                pass
        armed = False
        scored += 1
found = {"ran": list(ran), "scored": scored}
name, armed = "spiral_matrix", True  # would this have noticed?
DATASETS[name][0](DATASETS[name][1]()).score_answer("[1]", {"answer": "1 2", "metadata": {}})
print()
print(json.dumps(found | {"noticed": ran}))
"""


def prepare(monkeypatch: pytest.MonkeyPatch, out: Path, *options: object) -> dict[str, list[dict[str, Any]]]:
    monkeypatch.setattr(sys, "argv", ["prepare", "reasoning-gym", "--out", str(out), *map(str, options)])
    main()
    return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}


@pytest.mark.parametrize("name", ["chain_sum", "mini_sudoku", "rearc", "zebra_puzzles", "knight_swap"])
def test_prepared_problems_are_distinct_and_score_own_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    train, val = (SLOW[name], 1) if name in SLOW else (6, 3)
    splits = prepare(monkeypatch, tmp_path / "out", name, "--size", train, "--val", val)
    rows = [*splits["val"], *splits["train"]]
    assert {split: len(part) for split, part in splits.items()} == {"train": train, "val": val}
    assert len({row["prompt"][0]["content"] for row in rows}) == train + val
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        rule = rule_of(row["data_source"])
        assert rule is not None
        score = rule.score
        assert score is compute_score
        assert score(row["data_source"], f"So <answer> {truth} </answer>", truth, row["extra_info"]) == 1.0
        assert score(row["data_source"], "I do not know.", truth, row["extra_info"]) < 0.1
    assert list(check.faults(str(tmp_path / "out" / "train.parquet"))) == []
    assert prepare(monkeypatch, tmp_path / "again", name, "--size", train, "--val", val) == splits


def test_a_task_with_many_correct_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (row,) = prepare(monkeypatch, tmp_path, "graph_color", "--size", 1, "--val", 0)["train"]
    puzzle = from_json(row["extra_info"]["metadata"])["puzzle"]
    colors: dict[int, int] = {}
    for vertex in puzzle["vertices"]:
        near = {colors.get(a if b == vertex else b) for a, b in puzzle["edges"] if vertex in (a, b)}
        colors[vertex] = min(set(puzzle["color_options"]) - near, default=1)
    found = [
        compute_score(row["data_source"], f"<answer>{json.dumps(answer)}</answer>", "", row["extra_info"])
        for answer in (colors, dict.fromkeys(puzzle["vertices"], 1))
    ]
    assert found == [1.0, 0.01]


def test_json_keeps_tuples_and_keys() -> None:
    value = {"a": [(1, (2, "x"))], "b": {1: {(0, 1): []}, 2: None}, "c": {}}
    assert from_json(to_json(value)) == value


def test_settings_reach_the_task_and_its_scorer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--size", 2, "--val", 1, "--set", "min_terms=5", "max_terms=5")
    (row,) = prepare(monkeypatch, tmp_path, "chain_sum", *options)["val"]
    assert len(json.loads(row["extra_info"]["metadata"])["expression"].split()) == 9
    assert json.loads(row["extra_info"]["config"]) == {"min_terms": 5, "max_terms": 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["puzzle24"], "puzzle24 is refused: its scorer gives the response to sympy's parse_expr"),
        (["chain_summ"], "has no task 'chain_summ'; it has"),
        (["chain_sum", "--set", "terms=3"], "does not accept"),
        (["chain_sum", "--set", "min_terms"], "--set min_terms: write KEY=VALUE"),
        (["chain_sum", "--set", "max_terms=2", "max_digits=1"], "were asked for: ask for fewer, or --set other sizes"),
    ],
)
def test_unavailable_tasks_are_reported(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, *options)
    assert message in capsys.readouterr().err


def test_every_refused_task_exists() -> None:
    assert REFUSED.keys() <= FACTORY.DATASETS.keys()
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"{name} is refused"):
            load_task(name, "{}")


def test_no_scorer_runs_a_response_as_code(tmp_path: Path) -> None:
    hostile = [text.format(path=str(tmp_path / "made")) if "path" in text else text for text in HOSTILE]
    done = subprocess.run(
        [sys.executable, "-c", SCORE_EVERYTHING, *hostile], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ran"] == []
    assert ["spiral_matrix", "exec"] in found["noticed"]
    assert found["scored"] > 80 * len(hostile)
    assert not (tmp_path / "made").exists()


def unearned(name: str) -> dict[str, float]:
    """Return the mean score of each constant, and of the prompt, beyond the share of problems that it solves."""
    number = SLOW.get(name, NUM_PROBLEMS)
    task = FACTORY.create_dataset(name, seed=1, size=number)
    problems = [task[index] for index in range(number)]

    def excess(answer: str, problem: dict[str, Any]) -> float:
        try:
            score = float(task.score_answer(answer, problem))
        except Exception:  # a reward that failed
            return 0.0
        return score - (str(problem["answer"]).strip().lower() == answer.lower())

    answers = [(constant, [constant] * number) for constant in CONSTANTS]
    answers.append(("the prompt", [problem["question"] for problem in problems]))
    return {
        constant: sum(excess(answer, problem) for answer, problem in zip(given, problems, strict=True)) / number
        for constant, given in answers
    }


@pytest.mark.parametrize("name", sorted(FACTORY.DATASETS.keys() - REFUSED))
def test_no_constant_wins(name: str) -> None:
    assert {constant: share for constant, share in unearned(name).items() if not share <= UNEARNED} == {}


@pytest.mark.parametrize(
    ("name", "constant"), [("coin_flip", "0"), ("complex_arithmetic", "nan"), ("game_of_life_halting", "banana")]
)
def test_tasks_that_a_constant_wins_are_refused(name: str, constant: str) -> None:
    assert unearned(name)[constant] > UNEARNED
    assert name in REFUSED
