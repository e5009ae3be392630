"""GSM8K word problems, from local files or the Hugging Face hub."""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = {"train": "train", "val": "test"}  # ours, and what the data set calls it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this task."""
    parser.add_argument(
        "--from",
        dest="source",
        default="openai/gsm8k",
        help="directory with files *train*.jsonl and *test*.jsonl (or .parquet), one such file, which then makes the "
        "training problems only, or a data set id of the hub",
    )
    parser.add_argument("--train", type=int, default=None, help="training problems at most")
    parser.add_argument("--val", type=int, default=None, help="validation problems at most")
    parser.add_argument(
        "--extraction",
        choices=("strict", "flexible"),
        default="strict",
        help="which number of a response counts: the one after '####', or the last",
    )


def build(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The rows of `train` and `val`. Raises ValueError where the files are missing or not GSM8K."""
    place = Path(arguments.source)
    if not place.exists():
        place = _download(arguments.source)
    source = "openai/gsm8k" if arguments.extraction == "strict" else "gsm8k/flexible"
    rows = {}
    for split, name in {"train": ""}.items() if place.is_file() else SPLITS.items():
        file = place if place.is_file() else _file_of(place, name)
        problems = islice(_problems(file), getattr(arguments, split))
        rows[split] = [_row(problem, f"{file}, row {i}", source, split, i) for i, problem in enumerate(problems)]
    return rows


def _row(problem: dict[str, Any], place: str, source: str, split: str, index: int) -> dict[str, Any]:
    answer = problem.get("answer", "")
    if "question" not in problem or "####" not in answer:
        raise ValueError(f"{place}: a GSM8K problem has a question, and an answer that ends in '#### NUMBER'")
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{problem['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rsplit("####", 1)[1].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer},
    }


def _file_of(directory: Path, split: str) -> Path:
    found = sorted(path for kind in ("jsonl", "parquet") for path in directory.rglob(f"*{split}*.{kind}"))
    if not found:
        raise ValueError(f"{directory} has no file *{split}*.jsonl or *{split}*.parquet")
    # the hub's copy holds a second wording of the same problems beside `main`
    return next((path for path in found if path.parent.name == "main"), found[0])


def _problems(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        yield from pq.read_table(file).to_pylist()
        return
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, repo_type="dataset", allow_patterns=["*.parquet", "*.jsonl"]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--from {source}: there is no such directory, and the hub does not give such a data set ({error}); "
            "where there is no network, download train.jsonl and test.jsonl elsewhere and name their directory"
        ) from error
