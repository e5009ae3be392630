"""Story openings as prompts, from stories or from files of prompts."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from megarl.data.prepare.files import problems_of
from megarl.data.prepare.options import option

MOST_WORDS = 20  # of an opening
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["']))\s+""")


OPTIONS = (
    option(
        "--from source",
        "jsonl or parquet file with a story as `text` per row, or a directory with prompts_train.jsonl and "
        "prompts_val.jsonl, which have a `prompt` per row",
        type=click.Path(path_type=Path),
        required=True,
    ),
    option("--train", "training prompts at most", default=512),
    option("--val", "validation prompts at most", default=64),
)


def build(arguments: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `val` and `train`. A prompt is plain text, because the story models know no chat."""
    limits = {"val": arguments.val, "train": arguments.train}
    return {
        split: [_row(opening, split, index) for index, opening in enumerate(islice(openings, limits[split]))]
        for split, openings in _openings(arguments.source).items()
    }


def _openings(source: Path) -> dict[str, Iterator[str]]:
    """Return the openings to validate with, and to learn from. Of one file, the latter follow the former."""
    if source.is_dir():
        return {
            split: (problem["prompt"] for _, problem in problems_of(source / f"prompts_{split}.jsonl"))
            for split in ("val", "train")
        }
    sentences = (SENTENCE_END.split(problem["text"].strip(), maxsplit=1)[0] for _, problem in problems_of(source))
    openings = iter(dict.fromkeys(sentence for sentence in sentences if 0 < len(sentence.split()) <= MOST_WORDS))
    return {"val": openings, "train": openings}


def _row(prompt: str, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "tinystories",
        "prompt": prompt,
        "ability": "writing",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": split, "index": index},
    }
