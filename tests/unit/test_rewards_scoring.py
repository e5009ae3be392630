"""From functions to numbers: the built-in rewards, the user's own, their weighted sum, and the metrics of a batch."""

import math
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch import Rollouts, Scored
from megarl.distributed.sharded import Sharded
from megarl.platform.secrets import READ_CHARACTERS, redact
from megarl.rewards.built_in import known_data_source
from megarl.rewards.collective import Mean
from megarl.rewards.config import RulesSection
from megarl.rewards.rules import Rules
from megarl.rewards.scoring import MAX_METRICS, SHOWN_CHARACTERS, RuleScorer, first_failures, metrics_of
from megarl.sandbox.pool import ScoringResult
from megarl.sandbox.results import MAX_NUMBERS, MAX_PRED, RuleResult, as_numbers, as_rule_result
from megarl.training.reward_model import ModelScorer
from tests.support.records import alone, answer, prompts

ROW: dict[str, Any] = {
    "data_source": "countdown",
    "ground_truth": {"target": 8, "numbers": [3, 5]},
    "extra_info": {"split": "train"},
}


def judged(rules: Rules, text: str) -> RuleResult:
    """Return the result of a response to `ROW`, as the process of the rules computes it."""
    (outcome,) = rules.load()([ROW | {"solution_str": text}], math.inf)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def custom(tmp_path: Path, source: str, **changes: Any) -> Rules:
    (tmp_path / "mine.py").write_text(source)
    return Rules(path=str(tmp_path / "mine.py"), **changes)


def test_the_data_source_picks_the_built_in_reward() -> None:
    texts = ("<answer>3+5</answer>", "<answer>5 - 3</answer>", "nothing", "<answer>5+3</answer>")
    found = [judged(Rules(), text) for text in texts]
    assert [verdict.numbers["score"] for verdict in found] == [1.0, 0.1, 0.0, 1.0]
    assert [verdict.pred for verdict in found] == ["3+5", "5-3", "", "5+3"]


def test_a_custom_function_gets_the_fields_arguments(tmp_path: Path) -> None:
    source = """
def by_length(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth["target"], extra_info["split"]) == ("countdown", 8, "train")
    return len(solution_str)
"""
    reward = custom(tmp_path, source, name="by_length")
    assert judged(reward, "nothing") == ({"score": 7.0}, None)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("return 2", ({"score": 2.0}, None)),
        ("return True", ({"score": 1.0}, None)),
        ("return {'score': 0.5, 'acc': 1}", ({"score": 0.5, "acc": 1.0}, None)),
        ("return {'pred': '7', 'score': 0.5, 'steps taken': 3}", ({"score": 0.5, "steps taken": 3.0}, "7")),
        ("return {'pred': '', 'score': 0}", ({"score": 0.0}, "")),
        ("return {'pred': 'x' * 10**6, 'score': 0}", ({"score": 0.0}, "x" * MAX_PRED)),
        ("return {'pred': chr(0xd800), 'score': 0}", ({"score": 0.0}, "?")),  # no encoding has this text
        ("return {'pred': ['7'], 'score': 0}", ({"score": 0.0}, None)),
        ("import numpy; return numpy.float32(0.25)", ({"score": 0.25}, None)),
    ],
)
def test_return_values_of_common_scripts_are_accepted(
    body: str, verdict: tuple[dict[str, float], str | None], tmp_path: Path
) -> None:
    reward = custom(tmp_path, f"def compute_score(**_):\n    {body}\n")
    assert judged(reward, "") == verdict


@pytest.mark.parametrize("result", ["good", None, float("nan"), float("inf"), {"score": "1"}, {"accuracy": 1}, {}])
def test_other_values_than_numbers_are_refused(result: Any) -> None:
    with pytest.raises(TypeError, match="a reward returns a finite number or a dict with such a 'score', not "):
        as_numbers(result)


@given(
    names=st.sets(
        st.text(max_size=80) | st.sampled_from(["正确", "格式", "a b", "a_b", "x" * 64 + "1", "x" * 64 + "2"])
    )
)
def test_different_names_stay_different_numbers(names: set[str]) -> None:
    others = {name: float(number) for number, name in enumerate(sorted(names - {"score", "acc"})[:MAX_NUMBERS])}
    found = as_numbers({"score": 1.0} | others)
    assert sorted(found.values()) == sorted([1.0, *others.values()])
    assert all(len(name) <= 64 and name.isprintable() for name in found)


@pytest.mark.parametrize("given", [{"score": 1}, {"score": 1, "acc": 0}])
def test_most_extra_numbers_with_and_without_accuracy(given: dict[str, float]) -> None:
    found = as_numbers({**given, **{f"n {i}": i for i in range(2 * MAX_NUMBERS)}})
    assert found == {**given, **{f"n {i}": i for i in range(MAX_NUMBERS)}}


def test_names_in_any_script_stay_as_they_are() -> None:
    reported = {"score": 1.0, "正确": 1.0, "format ok": 0.5, "größe/mittel": 2.0}
    assert as_numbers(reported) == reported


def test_an_accuracy_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="'acc' is a finite number as the score is, not nan"):
        as_numbers({"score": 1, "acc": float("nan")})


NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(10**400), 10**400),
    st.sampled_from([1e300, 3.4e38, 3.5e38, -3.5e38, np.float64(1e39), np.float32("inf"), Fraction(10**50), True]),
)


@given(score=NUMBERS, others=st.dictionaries(st.sampled_from(["acc", "format", "length"]), NUMBERS))
def test_every_accepted_number_is_finite_in_float32(score: Any, others: dict[str, Any]) -> None:
    def holds(value: Any) -> bool:
        try:
            return bool(torch.tensor(float(value), dtype=torch.float32).isfinite())
        except OverflowError:
            return False

    given_numbers = {"score": score} | others
    if not holds(score) or not holds(others.get("acc", 0.0)):
        with pytest.raises(TypeError, match=r"not .* \(as float32\)"):
            as_numbers(given_numbers)
    else:
        assert as_numbers(given_numbers) == {
            name: float(value) for name, value in given_numbers.items() if holds(value)
        }


@given(st.lists(st.tuples(st.floats(-1e30, 1e30), st.floats(-3e38, 3e38)), min_size=1, max_size=3))
def test_weighted_sum_is_finite_in_float32_or_fault(parts: list[tuple[float, float]]) -> None:
    rules = Rules(weights={str(place): weight for place, (weight, _) in enumerate(parts)})
    results = {str(place): as_rule_result(score) for place, (_, score) in enumerate(parts)}
    total = sum(weight * score for weight, score in parts)
    outcome = rules._sum(results)
    if math.isfinite(torch.tensor(total, dtype=torch.float32)):
        assert isinstance(outcome, RuleResult) and outcome.numbers["score"] == total
    else:
        assert isinstance(outcome, TypeError)
        assert "the weighted sum of the scores is " in str(outcome)
        assert "which is not a finite number in float" in str(outcome)


def test_a_weighted_model_score_beyond_float32_is_named() -> None:
    class Model:
        def score(self, samples: Sharded[Rollouts]) -> torch.Tensor:
            return torch.tensor([1.0, 2e8])

    def scorer(weight: float) -> ModelScorer:
        return ModelScorer(model=cast(Any, Model()), weight=weight, rules=None, decode=lambda ids: "")

    samples = alone(answer(prompts([1]), [1, 1]))
    scored, _ = scorer(1e30).score(samples)
    assert scored.share.scores.isfinite().all()
    with pytest.raises(FloatingPointError, match=r"reward_model.weights: the weighted scores of sample 1 come to inf"):
        scorer(1e31).score(samples)


def test_secret_search_reads_bounded_part_of_giant_response(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, searched = "hf_" + "a1B2" * 8, list[int]()

    def counting(text: str) -> str:
        searched.append(len(text))
        return redact(text)

    monkeypatch.setattr("megarl.platform.secrets.redact", counting)
    for start in range(SHOWN_CHARACTERS - len(secret), SHOWN_CHARACTERS + 1):
        text = "x" * (start - 1) + " " + secret + " " + "y" * 10**6
        scored = answer(prompts([1]), [1]).extend(
            Scored, texts=[text], scores=torch.full((1,), math.nan), accuracies=torch.zeros(1), failures=["why"]
        )
        (message,) = first_failures(alone(scored))
        assert "a1B2" not in message
        assert len(message) < 300
    assert max(searched) <= READ_CHARACTERS


def test_rules_sum_by_weight_and_first_gives_accuracy(tmp_path: Path) -> None:
    source = "def compute_score(**_):\n    return {'score': 3, 'acc': 0.5, 'calls': 2}\n"
    weights = {"data_source": 1.0, "format": 0.25, "custom": -0.5}
    reward = custom(tmp_path, source, weights=weights)
    right = "<think>so</think><answer>3+5</answer>"
    numbers = {
        **{"data_source": 1.0, "format": 1.0, "custom": 3.0, "calls": 2.0},
        **{"score": 1.0 + 0.25 - 1.5, "acc": 1.0},
    }
    assert judged(reward, right) == (numbers, "3+5")
    assert judged(reward, "<answer>5-3</answer>").numbers["acc"] == 0.1
    first = custom(tmp_path, source, weights={"custom": 1.0, "format": 1.0})
    assert judged(first, right) == (
        {"custom": 3.0, "format": 1.0, "calls": 2.0, "score": 4.0, "acc": 0.5},
        None,
    )
    named = Rules(weights={"format": 1.0, "countdown": 1.0})
    assert judged(named, right).pred == "3+5"


def test_rules_read_data_source_only_on_request() -> None:
    assert Rules().reads_data_source()
    assert Rules(weights={"format": 1.0, "data_source": 1.0}).reads_data_source()
    assert not Rules(weights={"format": 1.0}).reads_data_source()
    assert not Rules(path="mine.py").reads_data_source()


def test_an_unknown_data_source_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'sudoku' \(known: countdown, .*gsm8k.*\); set custom_reward_function"):
        known_data_source("sudoku")


def test_file_without_reward_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"custom_reward_function.path: no such file: .*absent.py"):
        Rules(path=str(tmp_path / "absent.py")).load()
    source = "from math import sqrt\ndef first(): ...\ndef second(): ...\n"
    with pytest.raises(ValueError, match=r"mine.py has no function 'compute_score'; it has first, second$"):
        custom(tmp_path, source).load()
    with pytest.raises(ValueError, match=r"mine.py fails to load: ModuleNotFoundError: .*absent_package"):
        custom(tmp_path, "import absent_package\n").load()
    with pytest.raises(ValueError, match="mine.py fails to load: SyntaxError"):
        custom(tmp_path, "def compute_score(\n").load()
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ValueError, match="mine.txt is not a Python file"):
        Rules(path=str(tmp_path / "mine.txt")).load()


def test_metrics_are_shares_of_all_and_reported_means() -> None:
    outcomes = [
        ScoringResult(seconds=0.5, numbers={"score": 1.0, "acc": 1.0, "math": 0.5}),
        ScoringResult(seconds=2.0, fault="timeout"),
        ScoringResult(seconds=0.1, fault="error"),
        ScoringResult(seconds=0.1, numbers={"score": 3.0, "math": 1.0}),
    ]
    assert metrics_of(alone(answer(prompts([1]), [1] * 4)), outcomes) == {
        "reward/timeout_rate": 0.25,
        "reward/error_rate": 0.25,
        "reward/slowest_s": 2.0,
        "reward/acc/mean": Mean(1.0, 1),
        "reward/math/mean": Mean(1.5, 2),
    }


def test_metrics_are_bounded_whatever_is_reported() -> None:
    outcomes = [ScoringResult(seconds=0.0, numbers={"score": 0.0, f"n{number}": 1.0}) for number in range(100)]
    assert len(metrics_of(alone(answer(prompts([1]), [1] * 100)), outcomes)) == 3 + MAX_METRICS


def test_responses_that_nothing_asks_for_are_forgotten() -> None:
    """A step that refills the engine stops with responses that were finished and never scored."""

    class Pool:
        takes_ids = False

        def submit(self, arguments: bytes) -> Future[Any]:
            return Future()

    scorer = RuleScorer(rules=None, pool=Pool(), decode=str, section=RulesSection())  # type: ignore[arg-type]
    [prompt] = prompts([3]).prompts
    for _ in range(2):
        scorer.begin(prompt, [1, 2])
    assert sum(map(len, scorer._begun.values())) == 2
    scorer.forget()
    assert not scorer._begun
