"""The configuration of a judge behind a server: every fault is found before a request is sent."""

from pathlib import Path

import pytest

from tests.support.configs import faults, sound_arguments

JUDGE = "reward_model.judge"


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("JUDGE_API_KEY", "sesame-open")
    judge = ["url=http://h:8000/v1", "model=wise", "api_key_variable=JUDGE_API_KEY"]
    return [*sound_arguments(tmp_path), *(f"{JUDGE}.{key}" for key in judge), "reward_model.timeout_s=300"]


def test_valid_judge_scores_alone_or_with_rules(judged: list[str], tmp_path: Path) -> None:
    assert not faults(judged)
    assert not faults(judged, "reward_model.weights={judge: 1.0, format: 0.5}")
    assert not faults(judged, f"{JUDGE}.template='{{prompt}} {{solution_str}} {{extra_info[a][0]}} {{{{}}}}'")
    (tmp_path / "own.py").write_text("def compute_score(**_): return 1.0\n")
    found = faults(judged, f"custom_reward_function.path={tmp_path}/own.py")
    assert "so that the judge at http://h:8000/v1 is never asked: weigh both" in found["reward_model.weights"]


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (f"{JUDGE}.url=h:8000", "judge.url", "give one such as http://host:8000/v1"),
        (f"{JUDGE}.url=http://h:99999/v1", "judge.url", "give one such as http://host:8000/v1"),
        (f"{JUDGE}.url='http://[::1/v1'", "judge.url", "give one such as http://host:8000/v1"),
        (f"{JUDGE}.url='http:///v1'", "judge.url", "give one such as http://host:8000/v1"),
        (f'{JUDGE}.url="http://h\\x01/v1"', "judge.url", "give one such as http://host:8000/v1"),
        (f"{JUDGE}.model=''", "judge.model", "is empty: name the model"),
        (f"{JUDGE}.template='{{solution_str}} {{question}}'", "judge.template", "there is no {question}: choose from"),
        (f"{JUDGE}.template='{{prompt}}'", "judge.template", "does not show the response: write {solution_str}"),
        (JUDGE + ".template='{solution_str} {'", "judge.template", "write braces that stand for themselves twice"),
        (f"{JUDGE}.pattern='('", "judge.pattern", "is no regular expression"),
        (f"{JUDGE}.pattern='[0-9]'", "judge.pattern", "has 0 groups: write one"),
        (f"{JUDGE}.lowest=1.0", "judge.lowest", "1 is not below reward_model.judge.highest=1"),
        (f"{JUDGE}.api_key_variable=HOME", "judge.api_key_variable", "HOME is no name of a secret"),
        (f"{JUDGE}.api_key_variable=NO_SUCH_API_KEY", "judge.api_key_variable", "NO_SUCH_API_KEY is not set: export"),
        ("reward_model.timeout_s=10", "timeout_s", "10 s for one response are less than reward_model.judge.attempt_s="),
        ("reward_model.weights={format: 1.0}", "weights", "leaves out judge, so that http://h:8000/v1 is never called"),
    ],
)
def test_faults_with_their_remedies(judged: list[str], change: str, key: str, message: str) -> None:
    found = faults(judged, change)
    assert list(found) == [f"reward_model.{key}"]
    assert message in found[f"reward_model.{key}"]


@pytest.mark.parametrize("value", ["sesame-open\n", "sesame open", "sésame-open", "sesame\x7f"])
def test_key_that_no_header_has_is_named(judged: list[str], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", value)
    found = faults(judged)
    assert list(found) == [f"{JUDGE}.api_key_variable"]
    assert "JUDGE_API_KEY has a space, a line break or a letter that" in found[f"{JUDGE}.api_key_variable"]
    assert value not in str(found)
