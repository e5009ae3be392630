"""Data sets of a hub on this machine: as data files of a run, and as the input of `megarl prepare`."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.origins import hub_datasets
from megarl.data.prepare.hub_data import HubData
from tests.support.hub_server import hub_server
from tests.support.programs import PYTHON, run_program

READ = """
import sys
from megarl.data.rows import Rows
from megarl.platform.remote import remote_directory, split_uri
try:
    rows = Rows(sys.argv[1:], columns=["prompt"])
    print([row["prompt"] for row in rows])
    for name in sys.argv[1:]:
        directory, base = split_uri(name)
        print(remote_directory(directory).describe([base]))
except ValueError as error:
    print("said:", error)
"""


def as_parquet(*prompts: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": prompts, "answer": [prompt.upper() for prompt in prompts]}), buffer)
    return buffer.getvalue()


def as_lines(*rows: dict[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def read(*names: str) -> list[str]:
    code, printed = run_program(sys.executable, "-c", READ, *names, timeout_s=120)
    assert code == 0, printed
    return printed.splitlines()


def prepare(out: Path, task: str, *words: object) -> dict[str, list[dict[str, Any]]]:
    code, printed = run_program(*PYTHON, "megarl", "prepare", task, *words, "--out", out, timeout_s=120)
    assert code == 0, printed
    return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_runs_read_files_of_any_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(monkeypatch, tmp_path) as hub:
        hub.add("datasets/ann/sums", {"data/train.parquet": as_parquet("a", "b"), "x.jsonl": b'{"prompt": "c"}'})
        hub.add("datasets/ann/sums", {"data/train.parquet": as_parquet("old")}, "v1")
        uris = [
            f"hf://datasets/ann/sums{place}" for place in ("/data/train.parquet", "/x.jsonl", "@v1/data/train.parquet")
        ]
        prompts, *described = read(*uris)
        assert prompts == "['a', 'b', 'c', 'old']"
        hub.add("datasets/ann/sums", {"data/train.parquet": as_parquet("A", "b"), "x.jsonl": b'{"prompt": "c"}'})
        prompts, *again = read(*uris)
    assert prompts == "['A', 'b', 'c', 'old']"
    assert [one != other for one, other in zip(described, again, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ann/sums/gone.parquet", "no such data file: hf://datasets/ann/sums/gone.parquet"),
        ("ann/none/x.parquet", "(repository not found). If the repo is private, make sure you are authenticated"),
        ("ann/sums@v9/x.parquet", "(revision not found)"),
    ],
)
def test_missing_files_say_what_is_missing(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(monkeypatch, tmp_path) as hub:
        hub.add("datasets/ann/sums", {"x.parquet": as_parquet("a")})
        (said,) = read(f"hf://datasets/{name}")
    assert said.startswith("said: no such data file: ") and words in said


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HF_TOKEN", "hf_wrong", "401 Unauthorized"),
        ("HF_ENDPOINT", "http://127.0.0.1:9", "Connection refused"),
        ("HF_HUB_OFFLINE", "1", "offline mode is enabled"),
    ],
)
def test_unreachable_files_name_the_remedy(
    variable: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(monkeypatch, tmp_path) as hub:
        hub.add("datasets/ann/sums", {"x.parquet": as_parquet("a")})
        monkeypatch.setenv(variable, value)
        (said,) = read("hf://datasets/ann/sums/x.parquet")
    assert said.startswith("said: hf://datasets/ann/sums/x.parquet cannot be opened: ") and words in said
    assert "private or gated needs HF_TOKEN; without a network, download it on another machine" in said


CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: hard
  data_files: hard/*.parquet
---
# Sums
"""


def test_own_rows_come_from_declared_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        files = {"main/train-00000.parquet": "a", "main/test-00000.parquet": "t", "hard/all.parquet": "h"}
        hub.add("datasets/ann/sums", {name: as_parquet(text) for name, text in files.items()} | {"README.md": CARD})
        hub.add("datasets/ann/sums", {"main/train-1.parquet": as_parquet("old")}, "v1")
        splits = prepare(tmp_path / "main", "own", "ann/sums", "--answer", "answer", "--val-from", "ann/sums")
        assert {split: texts(rows) for split, rows in splits.items()} == {"train": ["a"], "val": ["t"]}
        assert splits["train"][0]["reward_model"]["ground_truth"] == "A"
        assert hub_datasets(str(tmp_path / "main" / "train.parquet")) == ["ann/sums"]
        assert not [path for path in hub.asked if "hard" in path]  # only what is read is downloaded
        assert texts(prepare(tmp_path / "hard", "own", "ann/sums:hard")["train"]) == ["h"]
        assert texts(prepare(tmp_path / "test", "own", "ann/sums", "--split", "test")["train"]) == ["t"]
        assert texts(prepare(tmp_path / "old", "own", "hf://datasets/ann/sums@v1")["train"]) == ["old"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the cache has it now
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert texts(prepare(tmp_path / "again", "own", "ann/sums:hard")["train"]) == ["h"]


def test_own_rows_come_from_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        hub.add("datasets/ann/sums", {"a/b.csv": b"prompt,answer\n1 + 1,007\n"})
        uri = "hf://datasets/ann/sums/a/b.csv"
        (row,) = prepare(tmp_path / "out", "own", uri, "--answer", "answer")["train"]
        assert row["reward_model"]["ground_truth"] == "007"
        assert hub_datasets(str(tmp_path / "out" / "train.parquet")) == ["ann/sums"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ann/sums", "--split", "dev"], "ann/sums has the splits train, test, but no split 'dev'"),
        (["ann/sums:soft"], "has the configurations main, hard: name a configuration, as in ann/sums:main"),
        (["ann/plain", "--split", "dev"], "the data set ann/plain has no file of a split 'dev'; it has data.jsonl"),
        (["hf://datasets/ann/sums/no.csv"], "the data set hf://datasets/ann/sums has no no.csv"),
        (["ann/none"], "as a Hugging Face id it failed: "),
        (["ann/none.csv"], "no such file: ann/none.csv"),
    ],
)
def test_missing_splits_name_those_there(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        hub.add("datasets/ann/sums", {"main/train-00000.parquet": as_parquet("a"), "README.md": CARD})
        hub.add("datasets/ann/plain", {"data.jsonl": b'{"prompt": "p"}'})
        out = tmp_path / "out"
        code, printed = run_program(*PYTHON, "megarl", "prepare", "own", *words, "--out", out, timeout_s=120)
    assert code == 2
    assert said in printed
    assert not out.exists()


def test_published_tasks_read_compressed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"prompt": "p", "chosen": "good", "rejected": "bad"}
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        names = [f"{kind}/{split}.jsonl.gz" for kind in ("harmless", "helpful") for split in ("train", "test")]
        hub.add("datasets/ann/pairs", {name: gzip.compress(as_lines(pair | {"prompt": name})) for name in names})
        splits = prepare(tmp_path / "all", "preferences", "--from", "ann/pairs")
        assert [row["prompt"] for row in splits["train"]] == ["harmless/train.jsonl.gz", "helpful/train.jsonl.gz"]
        assert [row["prompt"] for row in splits["val"]] == ["harmless/test.jsonl.gz", "helpful/test.jsonl.gz"]
        splits = prepare(tmp_path / "one", "preferences", "--from", "ann/pairs:helpful")
        assert [row["prompt"] for row in splits["train"]] == ["helpful/train.jsonl.gz"]
        uri = "hf://datasets/ann/pairs/helpful/test.jsonl.gz"
        splits = prepare(tmp_path / "file", "preferences", "--from", uri)
        assert [row["prompt"] for row in splits["train"]] == ["helpful/test.jsonl.gz"]
    assert hub_datasets([str(tmp_path / "all" / f"{split}.parquet") for split in ("train", "val")]) == ["ann/pairs"]


def test_names_mean_data_sets_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ann" / "here").mkdir(parents=True)
    for name in ("ann/here", "ann/sums.csv", "a/b/c", "sums", "/ann/sums", "./sums", "s3://ann/sums", "hf://ann/sums"):
        assert HubData.named(name) is None, name
    assert HubData.named("ann/sums:hard") == HubData("ann/sums", "ann/sums", "hard")
    at = "hf://datasets/ann/sums@v1"
    assert HubData.named(f"{at}:hard") == HubData(at, "ann/sums", "hard")
    assert HubData.named(f"{at}/a/b.csv") == HubData(at, "ann/sums", file="a/b.csv")
