"""Preference pairs from files: layouts that are understood, splits without overlap, faults by row."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.tasks import tinystories_sentiment
from megarl.commands.prepare import main
from megarl.data.parquet import write_rows
from megarl.data.prepare import check
from tests.support.assets import asset

TALK = [{"role": "user", "content": "Hi"}]
PAIR = {"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"}


def prepare(monkeypatch: pytest.MonkeyPatch, out: Path, task: str, *options: object) -> dict[str, list[dict[str, Any]]]:
    monkeypatch.setattr(sys, "argv", ["prepare", task, "--out", str(out), *map(str, options)])
    main()
    return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (PAIR, PAIR),
        (PAIR | {"prompt": TALK}, PAIR | {"prompt": TALK}),
        (PAIR | {"score_chosen": 4.5, "score_rejected": 2.0}, PAIR | {"margin": 2.5}),
        ({"question": "Hi", "system": "Be kind.", "chosen": "Hello!", "rejected": "What?"}, None),
        ({"prompt": "Hi", "chosen": [*TALK, said("Hello!")], "rejected": [*TALK, said("What?")]}, None),
        ({"prompt": "Hi", "chosen": [said("Hello!")], "rejected": [said("What?")]}, PAIR),
        ({"prompt": "Hi", "response_0": "What?", "response_1": "Hello!", "better_response_id": 1}, PAIR),
        ({"instruction": "Hi", "response_a": "Hello!", "response_b": "What?", "winner": "A"}, PAIR),
        (
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!",
                "rejected": "\n\nHuman: Hi\n\nAssistant: What?",
            },
            {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " Hello!", "rejected": " What?"},
        ),
    ],
)
def test_layouts_are_understood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: dict[str, Any], read: dict[str, Any] | None
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(written) + "\n")
    (row,) = prepare(monkeypatch, tmp_path / "out", "preferences", "--from", tmp_path / "pairs.jsonl")["train"]
    system = [{"role": "system", "content": "Be kind."}] if "system" in written else []
    assert row == (read or PAIR | {"prompt": [*system, *TALK]})
    assert list(check.faults(str(tmp_path / "out" / "train.parquet"))) == []


@pytest.mark.parametrize(
    "written",
    [
        {"text": "Hello!"},
        {"chosen": "Hello!", "rejected": "What?"},
        {"prompt": "Hi", "response_0": "What?", "response_1": "Hello!"},
        {"chosen": [*TALK, said("Hello!")], "rejected": [{"role": "user", "content": "Ho"}, said("What?")]},
    ],
)
def test_what_is_no_preference_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: dict[str, Any]
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n" + json.dumps(written) + "\n")
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "out", "preferences", "--from", tmp_path / "pairs.jsonl")
    assert "pairs.jsonl, row 1: no preference is recognised in" in capsys.readouterr().err


def test_a_margin_is_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR | {"margin": "high"}) + "\n")
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "out", "preferences", "--from", tmp_path / "pairs.jsonl")
    message = "pairs.jsonl, row 0, column margin: a finite number is expected (as float32), not 'high'"
    assert message in capsys.readouterr().err


def test_prompts_are_of_one_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n" + json.dumps(PAIR | {"prompt": TALK}) + "\n")
    options = ("--from", tmp_path / "pairs.jsonl")
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "out", "preferences", *options)
    assert "some prompts are texts and some are messages: add --chat" in capsys.readouterr().err
    rows = prepare(monkeypatch, tmp_path / "out", "preferences", *options, "--chat")["train"]
    assert [row["prompt"] for row in rows] == [TALK, TALK]


def test_held_out_pairs_share_no_prompt_with_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [PAIR | {"prompt": f"prompt {number % 10}", "chosen": f"answer {number}"} for number in range(40)]
    write_rows(tmp_path / "pairs.parquet", rows)
    options = ("--from", tmp_path / "pairs.parquet", "--held-out", 10)
    splits = prepare(monkeypatch, tmp_path / "out", "preferences", *options)
    assert {name: len(part) for name, part in splits.items()} == {"train": 28, "val": 12}
    assert not {row["prompt"] for row in splits["train"]} & {row["prompt"] for row in splits["val"]}
    assert prepare(monkeypatch, tmp_path / "again", "preferences", *options) == splits
    other = prepare(monkeypatch, tmp_path / "other", "preferences", *options, "--seed", 2)
    assert other["val"] != splits["val"]
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path / "all", "preferences", *options[:2], "--held-out", 40)


def test_faults_of_a_file_of_pairs(tmp_path: Path) -> None:
    rows = [
        PAIR | {"margin": 1.0},
        PAIR | {"rejected": "", "margin": 1.0},
        PAIR | {"rejected": "Hello!", "margin": 1.0},
        PAIR | {"prompt": None, "margin": float("nan")},
    ]
    write_rows(tmp_path / "pairs.parquet", rows)
    place = f"{tmp_path}/pairs.parquet, row"
    assert list(check.faults(f"{tmp_path}/pairs.parquet")) == [
        f"{place} 1, rejected: the text is empty",
        f"{place} 2, chosen, rejected: both are the same text, so neither is preferred",
        f"{place} 3, prompt: None is neither a text nor a list of messages {{role, content}}",
        f"{place} 3, margin: a finite number is expected (as float32), not nan",
    ]
    write_rows(tmp_path / "half.parquet", [{"prompt": "Hi", "chosen": "Hello!"}])
    (fault,) = check.faults(f"{tmp_path}/half.parquet")
    assert "has no column 'rejected'" in fault


def test_a_story_is_cut_at_its_sentences() -> None:
    story = "Tim had a dog. It ran away! Tim cried. Then it came back."
    opening, passages = tinystories_sentiment.cut(story, 4)
    assert opening == "Tim had a dog."
    assert passages == ["It ran away! Tim", "Tim cried. Then it", "Then it came back."]
    found = tinystories_sentiment.pairs(["a", "bb", "ccc"], len, gap=2)
    assert found == [("ccc", "a", 2)]


def test_sentiment_pairs_of_real_stories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stories = asset("data/tinystories/stories_val.jsonl")
    vader = pytest.importorskip("vaderSentiment.vaderSentiment", reason="needs vaderSentiment")
    options = ("--from", stories, "--val", 100, "--pairs", 2)
    splits = prepare(monkeypatch, tmp_path / "out", "tinystories-sentiment", *options)
    assert len(splits["val"]) >= 100
    assert len(splits["train"]) > 800
    assert not {row["story"] for row in splits["train"]} & {row["story"] for row in splits["val"]}
    analyzer = vader.SentimentIntensityAnalyzer()
    for row in splits["val"]:
        better, worse = (analyzer.polarity_scores(row[name])["compound"] for name in ("chosen", "rejected"))
        assert better - worse == pytest.approx(row["margin"], abs=1e-4)
        assert row["margin"] >= 0.5
    assert list(check.faults(str(tmp_path / "out" / "val.parquet"))) == []
    assert prepare(monkeypatch, tmp_path / "again", "tinystories-sentiment", *options) == splits
