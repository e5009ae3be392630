"""MATH competition problems, from local files in their published format or the Hugging Face hub."""

from types import SimpleNamespace

from megarl.data.prepare.files import rows_of, source_options
from megarl.data.table import DataRow
from megarl.platform.errors import UserError
from megarl.rewards.math import last_boxed

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


OPTIONS = source_options("DigitalLearningGmbH/MATH-lighteval")


def build(arguments: SimpleNamespace) -> dict[str, list[DataRow]]:
    """Return the rows of `train` and `val`. Raises UserError if the files are missing or not MATH."""
    return rows_of(arguments, _row)


def _row(problem: DataRow, place: str, split: str, index: int) -> DataRow:
    solution = problem.get("solution") or ""
    answer = problem.get("answer")
    if answer in (None, ""):
        answer = last_boxed(str(solution))
    if "problem" not in problem or answer is None:
        raise UserError(f"{place}: a MATH problem has a problem, and a solution with its answer in \\boxed{{...}}")
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{problem['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {
            "split": split,
            "index": index,
            "level": str(problem.get("level", "")),
            "type": str(problem.get("type", problem.get("subject", ""))),
            "answer": solution,
        },
    }
