"""Story openings as prompts: `python scripts/prepare_tinystories.py --from STORIES --out data/tinystories`.

Takes the first sentences of a jsonl or parquet file with a story as `text` per row, or reads `prompts_train.jsonl` and
`prompts_val.jsonl` of a directory, one object with a `prompt` per line. Writes `train.parquet` and `val.parquet`. A
prompt stays plain text: the story models know no chat.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.data.parquet import write_rows
from megarl.data.prepare.files import problems_of
from megarl.data.prepare.tinystories_sentiment import cut

MOST_WORDS = 20  # of an opening


def main() -> None:
    """Convert both splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="source", type=Path, required=True, help="file of stories, or directory of prompts"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the parquet files")
    parser.add_argument("--train", type=int, default=512, help="training prompts at most")
    parser.add_argument("--val", type=int, default=64, help="validation prompts at most")
    arguments = parser.parse_args()
    limits = {"val": arguments.val, "train": arguments.train}
    for split, openings in _openings(arguments.source).items():
        rows = [_row(opening, split, index) for index, opening in enumerate(islice(openings, limits[split]))]
        path = arguments.out / f"{split}.parquet"
        write_rows(path, rows)
        print(f"{path}: {len(rows)} rows")


def _openings(source: Path) -> dict[str, Iterator[str]]:
    """Return the openings to validate with, and to learn from. Of one file, the latter follow the former."""
    if source.is_dir():
        return {
            split: (problem["prompt"] for _, problem in problems_of(source / f"prompts_{split}.jsonl"))
            for split in ("val", "train")
        }
    sentences = (cut(problem["text"], 1)[0] for _, problem in problems_of(source))
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


if __name__ == "__main__":
    main()
