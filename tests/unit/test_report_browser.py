"""The page of all samples: what its scripts hold, and what hostile texts do to it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.commands.report import main
from megarl.report.browser import BROWSER_FILE, SCRIPTS, write_browser
from megarl.samples.schema import COLUMNS
from megarl.tracking.protocol import Row
from tests.support.browsers import BROWSER, browse

HOSTILE = "</script><script>document.title='taken'</script> &lt; \x1b[31m \ud800 \u2028"


def row(group: int, response: str, **values: Any) -> Row:
    """Return a sample whose tokens are the characters of its response."""
    known = {
        "group": group,
        "index": 40 + group,
        "data_source": "sums",
        "prompt": f"prompt {group}",
        "ground_truth": '"3"',
        "response": response,
        "response_ids": list(map(ord, response)),
        "rollout_log_probs": [-0.5 * place for place in range(len(response))],
        "truncated": False,
        "score": 0.25,
        "accuracy": 1.0,
    }
    return dict.fromkeys(COLUMNS) | known | values


def groups_in(directory: Path, number: int) -> tuple[str, list[Any]]:
    """Return the name and the groups in a script."""
    text = (directory / SCRIPTS / f"{number}.js").read_text(encoding="utf-8")
    name, groups = json.loads(f"[{re.fullmatch(r'show[(](.*)[)];', text.strip())[1]}]")  # type: ignore[index]
    return name, groups


def test_scripts_hold_all_samples_with_their_tokens(tmp_path: Path) -> None:
    steps = {
        "step_1": [row(0, "ab"), row(0, "c", score=None, failure="it raised")],
        "val_step_1": [row(0, "d"), row(1, "ef", observed=[False, True], turn_rewards=[0.0, 1.0])],
    }
    page = write_browser("a run", steps.items(), tmp_path, chr)
    assert page == tmp_path / BROWSER_FILE
    name, [group] = groups_in(tmp_path, 0)
    assert (name, group["prompt"]) == ("step_1", "prompt 0")
    assert group["facts"] == {"ground_truth": '"3"', "data_source": "sums", "index": 40}
    first, second = group["samples"]
    assert (first["tokens"], first["logs"], first["observed"]) == (["a", "b"], [0.0, -0.5], None)
    assert second["facts"] == {"accuracy": 1.0, "failure": "it raised", "truncated": False}
    _, groups = groups_in(tmp_path, 1)
    assert [len(group["samples"]) for group in groups] == [1, 1]
    assert groups[1]["samples"][0]["observed"] == [False, True]
    assert groups[1]["samples"][0]["rewards"] == [0.0, 1.0]
    assert '["step_1", "val_step_1"]' in page.read_text()


def test_responses_without_a_tokenizer_have_no_tokens(tmp_path: Path) -> None:
    write_browser("a run", [("step_1", [row(0, "ab")])], tmp_path, None)
    [sample] = groups_in(tmp_path, 0)[1][0]["samples"]
    assert sample.keys() == {"facts", "response"}


def test_texts_are_neither_markup_nor_control(tmp_path: Path) -> None:
    steps = {"step_1": [row(0, HOSTILE, prompt=HOSTILE, answer=HOSTILE)]}
    page = write_browser(HOSTILE, steps.items(), tmp_path, chr)
    for file in (page, tmp_path / SCRIPTS / "0.js"):
        text = file.read_text(encoding="utf-8")
        assert "<script>document" not in text
        assert "\x1b" not in text
    [group] = groups_in(tmp_path, 0)[1]
    assert group["prompt"] == group["samples"][0]["facts"]["answer"]
    assert group["prompt"].startswith("</script><script>")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
def test_a_browser_shows_the_last_file(tmp_path: Path) -> None:
    steps = {"step_1": [row(0, "ab")], "step_2": [row(0, HOSTILE), row(1, "xyz")]}
    dom, errors = browse(write_browser("a run", steps.items(), tmp_path, chr))
    assert errors == []
    assert "2 prompts" in dom
    assert 'title="log-probability -0.5"' in dom
    assert "<title>a run: samples - megarl</title>" in dom


def test_a_run_without_kept_samples_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"rollout_data_dir": None}}))
    assert main([str(tmp_path), "--samples"]) == 1
    assert "the run had no trainer.rollout_data_dir to keep them in" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"rollout_data_dir": str(tmp_path / "kept")}}))
    assert main([str(tmp_path), "--samples"]) == 1
    assert "kept has no files of them" in capsys.readouterr().err
