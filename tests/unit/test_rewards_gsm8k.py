"""GSM8K: the number of a response that counts."""

import json

import pytest

from megarl.rewards.built_in import RULES
from megarl.rewards.gsm8k import compute_score, compute_score_flexible
from tests.support.assets import asset


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("She sells 9 eggs.\n#### 18", "18", 1.0, 1.0),
        ("#### 18.00", "18", 1.0, 1.0),
        ("#### 1,234", "1234", 1.0, 1.0),
        ("#### $1,234.50.", "1234.5", 1.0, 1.0),
        ("####-5", "-5", 1.0, 1.0),
        ("#### 17\nNo wait.\n#### 18 dollars", "18", 1.0, 1.0),
        ("So she makes 18 dollars.", "18", 0.0, 1.0),
        ("16 - 3 - 4 = 9, and 2*9=18.", "18", 0.0, 1.0),
        ("that leaves 20-2", "2", 0.0, 1.0),
        ("that leaves -2", "-2", 0.0, 1.0),
        ("#### 18 and 3 more", "18", 0.0, 0.0),
        ("#### 19", "18", 0.0, 0.0),
        ("#### eighteen", "18", 0.0, 0.0),
        ("it is ...18.", "18", 0.0, 1.0),
        ("it is 18,", "18", 0.0, 1.0),
        ("it is 1,8", "8", 0.0, 0.0),
        ("it is 0,500", "500", 0.0, 0.0),
        ("it is -$18...", "-18", 0.0, 1.0),
        ("", "18", 0.0, 0.0),
    ],
)
def test_scores_by_hand(response: str, truth: str, strict: float, flexible: float) -> None:
    assert compute_score("gsm8k", response, truth, {}) == strict
    assert compute_score_flexible("gsm8k", response, truth, {}) == flexible


def test_a_ground_truth_may_be_a_number() -> None:
    assert compute_score("gsm8k", "#### 72", 72, None) == 1.0


def test_every_gsm8k_reference_answer_is_correct() -> None:
    lines = (asset("data/gsm8k") / "test.jsonl").read_text().splitlines()
    for answer in (json.loads(line)["answer"] for line in lines):
        truth = answer.rsplit("####", 1)[1]
        assert compute_score("openai/gsm8k", answer, truth, {}) == 1.0, answer
        assert compute_score_flexible("openai/gsm8k", answer, truth, {}) == 1.0, answer


def test_both_names_of_the_data_set_are_registered() -> None:
    assert RULES["openai/gsm8k"].score is RULES["gsm8k"].score is compute_score
