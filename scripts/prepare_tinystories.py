"""Story openings as prompts: `python scripts/prepare_tinystories.py --from DIR --out data/tinystories`.

Reads `prompts_train.jsonl` and `prompts_val.jsonl`, one object with a `prompt` per line, and writes `train.parquet` and
`val.parquet`. A prompt stays plain text: the story models know no chat.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.data.parquet import write_rows


def main() -> None:
    """Convert both splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="directory of the jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="directory of the parquet files")
    parser.add_argument("--val", type=int, default=64, help="validation prompts at most")
    arguments = parser.parse_args()
    for split, limit in (("train", None), ("val", arguments.val)):
        with (arguments.source / f"prompts_{split}.jsonl").open(encoding="utf-8") as lines:
            rows = [_row(json.loads(line)["prompt"], split, index) for index, line in enumerate(islice(lines, limit))]
        path = arguments.out / f"{split}.parquet"
        write_rows(path, rows)
        print(f"{path}: {len(rows)} rows")


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
