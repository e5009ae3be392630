"""SVAMP word problems, from local files in its published format or the Hugging Face hub."""

from decimal import Decimal, InvalidOperation
from functools import partial
from types import SimpleNamespace
from typing import Any

from megarl.data.prepare.files import EXTRACTION, rows_of, source_options
from megarl.data.prepare.gsm8k import INSTRUCTION
from megarl.platform.errors import UserError

OPTIONS = (*source_options("ChilleD/SVAMP"), EXTRACTION)


def build(arguments: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `train` and `val`. Raises UserError if the files are missing or not SVAMP."""
    source = "svamp" if arguments.extraction == "strict" else "svamp/flexible"
    return rows_of(arguments, partial(_row, source))


def _row(source: str, problem: dict[str, Any], place: str, split: str, index: int) -> dict[str, Any]:
    try:
        body = problem["Body"].strip()
        question = problem["Question"].strip()
        number = Decimal(str(problem["Answer"]))
    except (KeyError, AttributeError, InvalidOperation) as error:
        raise UserError(f"{place}: a SVAMP problem has Body, Question, and a number as Answer") from error
    stop = "" if body.endswith((".", "?", "!", ",")) else "."
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{body}{stop} {question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"{number.normalize():f}"},
        "extra_info": {"split": split, "index": index, "type": str(problem.get("Type", ""))},
    }
