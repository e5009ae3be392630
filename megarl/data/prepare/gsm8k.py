"""GSM8K word problems, from local files or the Hugging Face hub."""

from functools import partial
from types import SimpleNamespace

from megarl.data.prepare.files import EXTRACTION, rows_of, source_options
from megarl.data.table import DataRow
from megarl.platform.errors import UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


OPTIONS = (*source_options("openai/gsm8k"), EXTRACTION)


def build(arguments: SimpleNamespace) -> dict[str, list[DataRow]]:
    """Return the rows of `train` and `val`. Raises UserError if the files are missing or not GSM8K."""
    source = "openai/gsm8k" if arguments.extraction == "strict" else "gsm8k/flexible"
    return rows_of(arguments, partial(_row, source))


def _row(source: str, problem: DataRow, place: str, split: str, index: int) -> DataRow:
    answer = problem.get("answer", "")
    if "question" not in problem or not isinstance(answer, str) or "####" not in answer:
        raise UserError(f"{place}: a GSM8K problem has a question, and an answer that ends in '#### NUMBER'")
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{problem['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rsplit("####", 1)[1].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer},
    }
