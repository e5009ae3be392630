"""The look at all rows before a run: what no reward can score is named with file and row, in every file."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.config import rows_trial
from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_reward_train_config, load_sft_config
from megarl.config.rows_trial import check_responses, check_rows
from megarl.data.prepare import check
from megarl.sandbox.pool import Pool

MINIMAL = ("actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")
Look = Callable[..., list[str]]


def row(truth: Any, prompt: Any = "1 + 1 =", source: str = "gsm8k") -> dict[str, Any]:
    return {"prompt": prompt, "data_source": source, "reward_model": {"ground_truth": truth}}


GOOD = [row(str(number), f"{number} + 0 =") for number in range(20)]


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """A function that writes files of rows and returns what a run says of them before it starts."""
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))

    def look(*files: list[dict[str, Any]], val: list[dict[str, Any]] | None = None, more: tuple[str, ...] = ()) -> Any:
        names = [write(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(files)]
        arguments = [*MINIMAL, f"data.train_files=[{','.join(names)}]", *more]
        if val is not None:
            arguments.append(f"data.val_files={write(tmp_path / 'val.jsonl', val)}")
        return list(check_rows(load_config(arguments, world_size=None, check_paths=False)))

    return look


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # a file that is written again has changed
        path.write_text(text)
    return str(path)


def test_rows_that_can_teach_are_not_mentioned(looked: Look) -> None:
    assert looked(GOOD, val=[row("7", "3 + 4 =")]) == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("18 dollars")], "line 1, reward_model.ground_truth: '18 dollars' does not fit the reward of 'gsm8k'"),
        ([row("")], "ground_truth: '' does not fit the reward of 'gsm8k': the ground truth '' is not one"),
        ([row(r"\frac{1}{", source="math")], r"'\\frac{1}{' does not fit the reward of 'math'"),
        ([row(["1", ""], source="math")], "['1', ''] does not fit the reward of 'math'"),
        (
            [row({"names": ["Dr. X"], "is_knight": [True]}, source="knights_knaves")],
            "no response can state the roles of Dr. X: give each person another name",
        ),
        (
            [row({"names": ["X"], "is_knight": ["False"]}, source="knights_knaves")],
            "has a role that is neither true nor false: write no texts",
        ),
        ([row({"target": 7, "numbers": [1, 1]}, source="countdown")], "no expression of the numbers [1, 1] is 7"),
    ],
)
def test_unmatchable_ground_truths_are_named_with_row(
    rows: list[dict[str, Any]], expected: str, looked: Look, tmp_path: Path
) -> None:
    (remark,) = looked(GOOD, rows)
    assert remark.startswith(
        "data.train_files: 1 of 21 rows: no response can be right, or none can be scored: "
        f"{tmp_path / '1.jsonl'}, line 1, reward_model.ground_truth: "
    )
    assert expected in remark


def test_equal_rows_are_counted_and_first_is_named(looked: Look) -> None:
    rows = [*GOOD, *[row("18 dollars")] * 7, *GOOD[:2], GOOD[0] | {"reward_model": {"ground_truth": "5"}}]
    remark, again = looked(rows)
    assert "7 of 30 rows" in remark
    assert remark.count("18 dollars") == 2  # in the row, and in the error
    assert again.startswith("data.train_files: 8 of 30 rows: prompt and ground truth are those of an earlier row; the ")
    assert again.endswith("0.jsonl, line 22")


def test_equal_ground_truths_with_different_inputs_are_tried(looked: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of reasoning-gym reads `extra_info` too; the other rules read the ground truth alone."""
    trials, submit = list[Any](), Pool.submit
    monkeypatch.setattr(Pool, "submit", lambda pool, arguments: trials.append(arguments) or submit(pool, arguments))
    for source, number in (("reasoning_gym/none", 3), ("gsm8k", 1)):
        rows = [row("5", f"{seed} + 2 =", source) | {"extra_info": {"seed": seed}} for seed in range(3)]
        trials.clear()
        with suppress(ConfigError):  # reasoning-gym has no task of this name, or is not installed
            looked(rows)
        assert len(trials) == number


def test_second_file_with_wrong_keys_blocks_start(looked: Look) -> None:
    other = [row({"goal": number, "numbers": [1, 2]}, source="countdown") for number in range(1000)]
    with pytest.raises(ConfigError) as error:
        looked(GOOD, other)
    assert "data.train_files: 1,000 of 1,020 rows: no response can be right" in str(error.value)
    assert "1.jsonl, line 1, reward_model.ground_truth: {'goal': 0, 'numbers': [1, 2]}" in str(error.value)
    assert "reward_model.trial_rows=0 starts without this look" in str(error.value)
    assert looked(GOOD, other, more=("reward_model.trial_rows=0",)) == []


def test_row_faults_stop_start_according_to_on_failure(looked: Look) -> None:
    with pytest.raises(ConfigError, match="1 of 21 rows"):
        looked([*GOOD, row("x")], more=("reward_model.on_failure=stop",))
    with pytest.raises(ConfigError, match=r"data\.val_files: 1 of 1 rows"):
        looked(GOOD, val=[row("x")])
    assert len(looked([row("1"), row("x"), row("y")], more=("reward_model.on_failure=score",))) == 1
    with pytest.raises(ConfigError):
        looked([row("x"), row("y")], more=("reward_model.on_failure=score",))


def test_rows_that_cannot_teach_are_counted(looked: Look, tmp_path: Path) -> None:
    (reward := tmp_path / "own.py").write_text("def compute_score(**_): return 0.0\n")
    own = (f"custom_reward_function.path={reward}",)
    nothing = [row(truth, f"{truth}?") for truth in ("", " ", None, "NaN", "none", "null", float("nan"))]
    blank = [row("1", " \n"), row("1", [{"role": "user", "content": ""}])]
    notes = looked([*GOOD, *nothing, *blank], val=[GOOD[3], GOOD[3], row("1", "new")], more=own)
    assert [remark.partition("; ")[0] for remark in notes] == [
        "data.train_files: 7 of 29 rows: the ground truth is empty",
        "data.train_files: 2 of 29 rows: the prompt is blank",
        "data.val_files: 2 of 3 rows: the prompt is a training prompt too",
        "data.val_files: 1 of 3 rows: prompt and ground truth are those of an earlier row",
    ]
    assert f"the first is {tmp_path / '0.jsonl'}, line 21" in notes[0]
    assert looked([{"prompt": "1"}, {"prompt": "2"}], more=own) == []  # a reward that needs no ground truth


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": None}, "prompt: None is neither a text nor a list of messages"),
        ({"prompt": [{"role": "ghost", "content": "x"}]}, "prompt: message 0: role 'ghost' is none of"),
        ({"extra_info": "{half"}, "extra_info: the text '{half' is not JSON"),
        ({"reward_model": "x"}, "reward_model: the text 'x' is not JSON"),
    ],
)
def test_row_that_a_run_cannot_read_blocks_start(
    wrong: dict[str, Any], said: str, looked: Look, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        looked([*GOOD, GOOD[0] | wrong])
    assert f"data.train_files: 1 of 21 rows: a column has no value that a run can read: {tmp_path}" in str(error.value)
    assert f"0.jsonl, line 21, {said}" in str(error.value)
    assert len(check.faults(str(tmp_path / "0.jsonl"))) == 1


def test_truths_that_are_all_empty_are_counted(looked: Look, tmp_path: Path) -> None:
    (reward := tmp_path / "own.py").write_text("def compute_score(**_): return 0.0\n")
    (remark,) = looked([row("", "1"), row(float("nan"), "2")], more=(f"custom_reward_function.path={reward}",))
    assert "2 of 2 rows: the ground truth is empty" in remark


def test_responses_that_cannot_teach_are_counted(tmp_path: Path) -> None:
    def remarks(load: Any, *rows: dict[str, Any]) -> list[str]:
        file = write(tmp_path / "pairs.jsonl", list(rows))
        arguments = ["model.path=org/start", f"data.train_files={file}"]
        return list(check_responses(load(arguments, world_size=None, check_paths=False)))

    pair = {"prompt": "1 + 1", "response": "2"}
    (remark,) = remarks(load_sft_config, pair, pair | {"response": " "}, pair | {"response": ""})
    assert remark.startswith("data.train_files: 2 of 3 rows: a response is blank; the first is ")
    with pytest.raises(ConfigError, match="line 2, response: a text is expected, not 2"):
        remarks(load_sft_config, pair, pair | {"response": 2})
    choice = {"prompt": "1 + 1", "chosen": "2", "rejected": "3"}
    (remark,) = remarks(load_reward_train_config, choice, choice | {"rejected": "2"})
    assert "1 of 2 rows: both responses are the same text; the first is " in remark
    assert remark.endswith("line 2")
    with pytest.raises(ConfigError, match="line 1, rejected: the text is empty"):
        remarks(load_reward_train_config, choice | {"rejected": ""})


def test_words_for_math_verify_are_a_remark(looked: Look) -> None:
    (remark,) = looked([row("~12", source="math"), row("12", source="math")])
    assert "1 of 2 rows: the ground truth is plain text to math-verify, so only the same words are right" in remark


def test_rules_in_weights_read_the_truths_too(looked: Look) -> None:
    with pytest.raises(ConfigError, match="does not fit the reward of 'multiply'"):
        looked([row("0.5", source="gsm8k")], more=("reward_model.weights={multiply: 1.0, format: 0.1}",))


def test_a_second_start_remembers_until_a_file_changes(looked: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    first = looked([*GOOD, row("x")], val=[GOOD[0]])
    assert len(first) == 2
    with monkeypatch.context() as patch:
        patch.delattr(rows_trial, "inspect_rows")
        assert looked([*GOOD, row("x")], val=[GOOD[0]]) == first
        with pytest.raises(NameError):
            looked([*GOOD, row("x"), row("y")], val=[GOOD[0]])
        with pytest.raises(NameError):
            looked([*GOOD, row("x")], val=[GOOD[0]], more=("data.prompt_key=data_source",))
    assert "2 of 22 rows" in looked([*GOOD, row("x"), row("y")])[0]


def test_a_damaged_memory_is_no_memory(looked: Look, tmp_path: Path) -> None:
    first = looked([*GOOD, row("x")])
    (kept,) = (tmp_path / "cache" / "rows").iterdir()
    kept.write_bytes(kept.read_bytes()[:10])
    assert looked([*GOOD, row("x")]) == first


def test_file_check_names_same_rows(looked: Look, tmp_path: Path) -> None:
    rows = [*GOOD, row("x"), row("1", " "), row("~1", source="math"), GOOD[0]]
    notes = looked(rows)
    report = check.examine(str(tmp_path / "0.jsonl"))
    assert [line.partition("jsonl, ")[2] for line in report.faults] == [
        "line 21, reward_model.ground_truth: 'x' does not fit the reward of 'gsm8k': "
        "the ground truth 'x' is not one number",
        "line 22, the prompt is blank",
    ]
    words, again = report.notes
    assert all(any(line in remark for remark in notes) for line in (report.faults[0], words))
    assert again.endswith("line 24, prompt and ground truth are those of an earlier row")
