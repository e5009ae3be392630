"""Openings of stories, from the stories themselves or from files of prompts."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scripts.prepare_tinystories import main


def test_openings_of_stories_are_distinct_short_and_in_one_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, out = tmp_path / "stories.jsonl", tmp_path / "out"
    stories = [f"Story {number} began. It went on." for number in range(6)]
    texts = [stories[0], *stories, "", "a very " * 20 + "long story. It went on."]
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    monkeypatch.setattr(sys, "argv", ["", "--from", str(source), "--out", str(out), "--val", "2", "--train", "3"])
    main()
    found = {split: pq.read_table(out / f"{split}.parquet")["prompt"].to_pylist() for split in ("val", "train")}
    assert found == {
        "val": ["Story 0 began.", "Story 1 began."],
        "train": ["Story 2 began.", "Story 3 began.", "Story 4 began."],
    }
