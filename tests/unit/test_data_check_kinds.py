"""Checks of files that other trainers make: `megarl prepare --check` agrees with the run that reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.commands import prepare as command
from megarl.data.prepare.check import READERS, Kind, examine

CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
TALK = [*CHAT, {"role": "assistant", "content": "7"}]
FILES: dict[str, tuple[dict[str, Any], Kind, str]] = {
    "countdown": (
        {"target": 7, "nums": [3, 4], "data_source": "countdown", "prompt": CHAT, "ability": "math"}
        | {"reward_model": {"style": "rule", "ground_truth": {"target": 7, "numbers": [3, 4]}}},
        "rl",
        "",
    ),
    "dapo": (
        {"data_source": "math_dapo", "prompt": CHAT, "ability": "MATH", "extra_info": {"index": "9"}}
        | {"reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "7"}},
        "rl",
        "",
    ),
    "math with a label before the answer": (
        {"data_source": "math", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "Answer: 12"}},
        "rl",
        "no usual answer equals the ground truth 'Answer: 12', because of 'Answer: ': give the answer alone",
    ),
    "countdown with a text of numbers": (
        {"data_source": "countdown", "prompt": CHAT}
        | {"reward_model": {"style": "rule", "ground_truth": {"target": 10, "numbers": "46"}}},
        "rl",
        "has numbers that are no list",
    ),
    "model style": (
        {"data_source": "gsm8k", "prompt": CHAT, "reward_model": {"style": "model", "ground_truth": "x"}},
        "rl",
        "reward_model.ground_truth: 'x' does not fit the reward of 'gsm8k'",
    ),
    "gsm8k with a tool": (
        {"data_source": "openai/gsm8k", "prompt": CHAT, "agent_name": "tool_agent"}
        | {"reward_model": {"style": "rule", "ground_truth": "7"}},
        "rl",
        "note: {file}: the column agent_name is not read: megarl trains on texts",
    ),
    "hh-rlhf prompts": (
        {"data_source": "Anthropic/hh", "prompt": CHAT, "chosen": "a", "rejected": "b", "ability": "alignment"}
        | {"reward_model": {"style": "model", "ground_truth": "a"}},
        "rl",
        "data_source: no built-in reward for data source 'Anthropic/hh'",
    ),
    "hh-rlhf pairs": ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "preference", ""),
    "equal pairs": ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "preference", "both are the same text"),
    "hh-rlhf sft": ({"prompt": "Hi", "response": "Hello"}, "sft", ""),
    "chat sft": ({"prompt": CHAT, "response": "7"}, "sft", ""),
    "sft without a response": ({"prompt": CHAT, "response": 7}, "sft", "response: a text is expected, not 7"),
    "multi-turn sft": ({"messages": TALK}, "sft", "the column messages holds conversations, and a run reads a column"),
    "sharegpt": ({"conversations": TALK}, "sft", "the column conversations holds conversations"),
    "geometry3k": (
        {"data_source": "hiyouga/geometry3k", "prompt": CHAT, "images": ["x"]}
        | {"reward_model": {"style": "rule", "ground_truth": "7"}},
        "rl",
        "data_source: no built-in reward for data source 'hiyouga/geometry3k'",
    ),
    "a question alone": ({"question": "3+4"}, "rl", "has no column 'prompt'"),
}


def write(path: Path, row: dict[str, Any]) -> str:
    path.write_text(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize("name", FILES)
def test_file_is_checked_for_run_kind_reading_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row, kind, said = FILES[name]
    file = write(tmp_path / "rows.jsonl", row)
    monkeypatch.setattr("sys.argv", ["prepare", "--check", file])
    is_sound = not said or said.startswith("note: ")
    try:
        command.main()
    except SystemExit as stop:
        assert stop.code == 1
        assert not is_sound
    printed = capsys.readouterr().out
    assert said.format(file=file) in printed
    assert is_sound == printed.endswith(f"{file}: no faults in the {READERS[kind]}\n")
    assert examine(file).kind == kind


def test_the_kind_may_be_named(tmp_path: Path) -> None:
    both = {"prompt": "Hi", "chosen": "a", "rejected": "b", "response": "c", "data_source": "own"}
    file = write(tmp_path / "rows.jsonl", both)
    assert examine(file).faults != []
    assert examine(file, kind="sft").faults == examine(file, kind="preference").faults == []
    assert (
        "has no column 'chosen'" in examine(write(tmp_path / "a.jsonl", {"prompt": "x"}), kind="preference").faults[0]
    )


def test_run_options_mark_file_as_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", FILES["hh-rlhf pairs"][0])
    monkeypatch.setattr("sys.argv", ["prepare", "--check", file, "--reward-model"])
    command.main()
    assert "no faults in the prompts of megarl train" in capsys.readouterr().out
