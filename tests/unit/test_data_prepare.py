"""Task preparation: problems that are solvable, distinct and scored as solved, in files that the data set reads."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.commands import prepare as commands
from megarl.commands.prepare import main
from megarl.data.config import DataSection
from megarl.data.prepare import countdown
from megarl.data.prepare.files import problems_of
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.built_in import RULES
from megarl.rewards.countdown import evaluate
from tests.support.assets import asset
from tests.support.sentencepieces import train_sentencepiece


def prepare(monkeypatch: pytest.MonkeyPatch, out: Path, task: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    monkeypatch.setattr(sys, "argv", ["prepare", task, "--out", str(out), *options])
    main()
    return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}


@given(st.integers(), st.integers(2, 6), st.integers(1, 30), st.sampled_from(["+-*/", "+-", "*/"]))
def test_every_solution_uses_all_numbers_and_reaches_target(
    seed: int, num_numbers: int, max_number: int, operators: str
) -> None:
    problem = countdown.draw(random.Random(seed), num_numbers=num_numbers, max_number=max_number, operators=operators)
    if problem is None:
        return
    value, numbers = evaluate(problem.solution)
    assert value == problem.target
    assert sorted(numbers) == sorted(problem.numbers)
    assert set(problem.solution) <= set("0123456789()" + operators + "-")


def test_countdown_splits_are_distinct_and_scored_as_solved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = prepare(monkeypatch, tmp_path / "out", "countdown", "--train", "200", "--val", "50", "--sft", "30")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 200, "val": 50, "sft": 30}
    assert "val.parquet: 50 rows" in capsys.readouterr().out

    truths = [row["reward_model"]["ground_truth"] for name in ("train", "val") for row in splits[name]]
    keys = {(tuple(sorted(truth["numbers"])), truth["target"]) for truth in truths}
    solved = {row["prompt"] for row in splits["sft"]}
    assert len(keys) == 250
    assert not solved & {row["prompt"] for name in ("train", "val") for row in splits[name]}
    for row in splits["sft"]:
        numbers, target = row["prompt"].removesuffix(" :").split(" = ")
        truth = {"target": int(target), "numbers": [int(number) for number in numbers.split()]}
        assert RULES["countdown/bare"].score("countdown/bare", row["response"], truth, {}) == 1.0

    again = prepare(monkeypatch, tmp_path / "more", "countdown", "--train", "300", "--val", "50")
    assert again["val"] == splits["val"]  # more training data leaves the validation as it is
    other = prepare(monkeypatch, tmp_path / "other", "countdown", "--train", "200", "--val", "50", "--seed", "2")
    assert other["val"] != splits["val"]


def test_careless_demonstrations_join_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--train", "4", "--val", "2", "--sft", "40", "--operators", "+-")
    solved = prepare(monkeypatch, tmp_path / "solved", "countdown", *options)["sft"]
    mixed = prepare(monkeypatch, tmp_path / "mixed", "countdown", *options, "--careless", "0.6")["sft"]
    assert mixed[:40] == solved
    assert [row["prompt"] for row in mixed[40:]] == [row["prompt"] for row in (solved + solved)[:60]]
    assert all(row["response"] == row["prompt"].split(" = ")[0].replace(" ", "-") for row in mixed[40:])


@pytest.mark.parametrize("template", ["plain", "base", "qwen-instruct"])
def test_countdown_templates_are_read_and_their_responses_solve(
    template: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--train", "4", "--val", "2", "--sft", "2", "--num-numbers", "3", "4", "--template", template)
    splits = prepare(monkeypatch, tmp_path / "out", "countdown", *options)
    model = train_sentencepiece(tmp_path / "small.model", byte_fallback=True, vocab_size=550)
    tokenizer = load_tokenizer(str(model), chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    file = str(tmp_path / "out" / "train.parquet")
    prompts = PromptDataset(DataSection(train_files=file, max_prompt_length=2000), file, tokenizer)
    for index in range(len(prompts)):
        numbers = prompts[index].ground_truth["numbers"]
        assert (" " if template == "plain" else ", ").join(map(str, numbers)) in prompts[index].text
    source = prompts[0].data_source
    assert source == ("countdown/bare" if template == "plain" else "countdown")
    problem = countdown.Problem(numbers=(3, 5, 8), target=16, solution="3+5+8")
    truth = {"target": 16, "numbers": [3, 5, 8]}
    assert RULES[source].score(source, countdown.response(problem, template), truth, {}) == 1.0
    assert len(splits["sft"]) == 2


def test_impossible_countdown_request_names_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, "countdown", "--max-number", "2", "--num-numbers", "2")
    assert "2256 were asked for: raise --max-number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, "countdown", "--operators", "+^")
    assert "--operators '+^': give one or more of + - * /" in capsys.readouterr().err


PROBLEM = {"question": "How many?", "answer": "Count: <<1+1=2>>2\n#### 1,002"}


def write_jsonl(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_gsm8k_from_the_real_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = str(asset("data/gsm8k"))
    splits = prepare(monkeypatch, tmp_path, "gsm8k", "--from", source, "--val", "100", "--extraction", "flexible")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 7473, "val": 100}
    row = splits["train"][0]
    assert row["data_source"] == "gsm8k/flexible"
    assert row["prompt"][0]["content"].startswith("Natalia sold clips")
    assert row["reward_model"]["ground_truth"] == "72"
    for row in splits["val"]:
        truth = row["reward_model"]["ground_truth"]
        assert RULES[row["data_source"]].score(row["data_source"], row["extra_info"]["answer"], truth, {}) == 1.0


def test_gsm8k_from_a_copy_of_the_hubs_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for config, question in (("main", "Main?"), ("socratic", "Socratic?")):
        for split in ("train", "test"):
            path = tmp_path / "repo" / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([PROBLEM | {"question": question}]), path)
    splits = prepare(monkeypatch, tmp_path / "out", "gsm8k", "--from", str(tmp_path / "repo"))
    (row,) = splits["val"]
    assert row["prompt"][0]["content"].startswith("Main? Let's think")
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"]["ground_truth"] == "1002"


def test_gsm8k_from_one_file_makes_training_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "problems.jsonl", json.dumps(PROBLEM) + "\n")
    splits = prepare(monkeypatch, tmp_path / "out", "gsm8k", "--from", str(tmp_path / "problems.jsonl"))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 1}


def test_uncheckable_file_is_named_without_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare", "--check", "scheme://ann:Swordf1sh@host"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("scheme://***@host cannot be opened")


def test_check_of_file_includes_its_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", '{"prompt": "1+1="}\n')
    reward = tmp_path / "mine.py"
    reward.write_text(
        "class Judge:\n    def __init__(self, depth): ...\n    def compute_score_batch(self, texts): ...\n"
    )
    checked = ["prepare", "--check", str(tmp_path / "rows.jsonl"), "--custom-reward-function", str(reward)]
    for arguments, message in (
        ([], f"{reward} has no function 'compute_score'; it has Judge"),
        (["--custom-reward-name", "Judge"], "the constructor of Judge needs depth: give it in custom_reward_function"),
        (
            ["--custom-reward-name", "Judge", "--reward-kwarg", "depth"],
            "Judge.compute_score_batch does not accept data_sources, solution_strs, ground_truths, extra_infos as",
        ),
    ):
        monkeypatch.setattr(sys, "argv", [*checked, *arguments])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().out


def test_missing_tokenizer_is_reported_before_files_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "out", "multiply", "--tokenizer", "/nowhere")
    assert "megarl prepare: --tokenizer: no such file or directory: /nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gsm8k_sources_that_are_none_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_jsonl(tmp_path / "odd" / "train.jsonl", '{"question": "1+1?", "answer": "2"}\n')
    write_jsonl(tmp_path / "number" / "train.jsonl", '{"question": "1+1?", "answer": 2}\n')
    write_jsonl(tmp_path / "half" / "train.jsonl", "")
    for source, message in (
        ("nobody/nothing", "--from: nobody/nothing is no local directory, and as a Hugging Face id it failed: "),
        (str(tmp_path / "odd"), "train.jsonl, row 0: a GSM8K problem has a question"),
        (str(tmp_path / "number"), "train.jsonl, row 0: a GSM8K problem has a question"),
        (str(tmp_path / "half"), "has no file *test*.jsonl"),
    ):
        with pytest.raises(SystemExit):
            prepare(monkeypatch, tmp_path / "out", "gsm8k", "--from", source)
        assert message in capsys.readouterr().err


def test_lines_of_json_end_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '\ufeff{"question": "1\u2028\x85+1?"}\r\n\n{"question": "2"}', encoding="utf-8"
    )
    found = list(problems_of(tmp_path / "train.jsonl"))
    assert found == [(0, {"question": "1\u2028\x85+1?"}), (1, {"question": "2"})]


def test_a_split_is_a_word_of_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("latest-train", "gsm8k_test"):
        write_jsonl(tmp_path / "given" / f"{name}.jsonl", json.dumps({"question": name, "answer": "#### 1"}) + "\n")
    splits = prepare(monkeypatch, tmp_path / "out", "gsm8k", "--from", str(tmp_path / "given"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1, "val": 1}


@pytest.mark.parametrize(
    ("fields", "truth"),
    [
        ({"answer": 0}, "0"),
        ({"answer": "0", "solution": None}, "0"),
        ({"answer": "", "solution": r"so \boxed{7}"}, "7"),
        ({"solution": r"so \boxed{8}"}, "8"),
    ],
)
def test_math_answer_is_column_or_box(monkeypatch: Any, tmp_path: Path, fields: dict[str, Any], truth: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", json.dumps({"problem": "x?", **fields}) + "\n")
    [row] = prepare(monkeypatch, tmp_path / "out", "math", "--from", str(tmp_path / "train.jsonl"))["train"]
    assert row["reward_model"]["ground_truth"] == truth


@pytest.mark.parametrize("option", ["--max-number", "--num-numbers"])
def test_countdown_needs_a_number(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "out", "countdown", option, "0")


def test_guessing_is_demonstrated_with_and_without_care(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for careless in ("0", "1"):
        options = ("--train", "8", "--val", "4", "--sft", "30", "--careless", careless)
        rows = prepare(monkeypatch, tmp_path / careless, "guess", *options)
        assert (len(rows["train"]), len(rows["val"])) == (8, 4)
        assert all(1 <= row["reward_model"]["ground_truth"] <= 16 for row in rows["train"])
        assert rows["train"][0]["prompt"] == [{"role": "user", "content": "1-16"}]
        heeded = []
        for turn in rows["sft"]:
            low, high = 1, 16
            for guess, said in zip(turn["prompt"][1::2], turn["prompt"][2::2], strict=True):
                number, is_higher = int(guess["content"]), said["content"] == "higher"
                low, high = (max(low, number + 1), high) if is_higher else (low, min(high, number - 1))
            heeded.append(low <= int(turn["response"]) <= high)
        assert all(heeded) == (careless == "0")


def test_story_openings_are_short_and_never_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, out = tmp_path / "stories.jsonl", tmp_path / "out"
    stories = [f"Story {number} began. It went on." for number in range(6)]
    texts = [stories[0], *stories, "", "a very " * 20 + "long story. It went on."]
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    splits = prepare(monkeypatch, out, "tinystories", "--from", str(source), "--val", "2", "--train", "3")
    assert {split: [row["prompt"] for row in rows] for split, rows in splits.items()} == {
        "val": ["Story 0 began.", "Story 1 began."],
        "train": ["Story 2 began.", "Story 3 began.", "Story 4 began."],
    }


def test_broken_example_costs_no_other_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good_task.py").write_text('"""Nothing."""\n')
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.setattr(commands, "EXAMPLES", tmp_path)
    commands.tasks.cache_clear()
    try:
        assert commands.tasks().keys() == {*commands.TASKS, "good-task"}
        commands.tasks()
    finally:
        commands.tasks.cache_clear()
    said = capsys.readouterr().err
    assert said.count("note: megarl prepare") == 1
    assert "broken.py fails to load: ZeroDivisionError: division by zero" in said
