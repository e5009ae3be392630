"""The judge behind a server, in real processes: a server may fail, stall, limit and lie."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.config import CustomRewardSection, JudgeSection, RulesSection
from megarl.rewards.configured import make_pool
from megarl.rewards.judge import Judge, VerdictError
from megarl.sandbox.pool import Pool, ScoringResult
from megarl.sandbox.wire import pack
from tests.support.http_server import serving
from tests.support.judge_server import JudgeServer

KEY = "sesame-open-1234567890"
ALONE = {"template": "{solution_str}"}
SCORES = {
    "Score: 0.25": 0.25,
    "Score: 0.5 at first, but\n**Score: 1**": 1.0,
    "fails-once Score: 0.5": 0.5,
    "limits-once Score: 0.5": 0.5,
    "stalls-once Score: 0.5": 0.5,
    "hangs-up-once Score: 0.5": 0.5,
    "talks-nonsense-once Score: 0.5": 0.5,
    "compresses-wrongly-once Score: 0.5": 0.5,
    "nests-deeply-once Score: 0.5": 0.5,
}
NO_VERDICT = "no verdict with one number, as reward_model.judge.pattern describes it"
FAULTS = {
    "It is good.": f"{NO_VERDICT}: 'It is good.'",
    "Score: nan": f"{NO_VERDICT}: 'Score: nan'",
    "is-cut Score: 0": "the judge's reply is cut: raise max_tokens in reward_model.judge.request: 'Score: 0'",
    "Score: 7": "VerdictError: the judge's 7 is not from 0 to 1: 'Score: 7'",
    "refuses": "the judge at reward_model.judge.url refuses the request: status 401: 'no such key: Bearer ***'",
    "is-away": "the judge failed 2 times, at last: status 503: 'away'",
    "stalls": "the judge failed 2 times, at last: no reply in reward_model.judge.attempt_s=1",
    "has-no-choice": "the judge failed 2 times, at last: the reply is no chat completion: '{\"choices\": []}'",
    "has-no-text": "the judge failed 2 times, at last: the reply has no text",
}
STALLING = ["stalls", "stalls-once Score: 0.5"]
LIMITS: dict[tuple[float, int], list[str]] = {
    (60.0, 2): [text for text in (*SCORES, *FAULTS) if text not in STALLING],
    (1.0, 2): ["stalls"],
    (3.0, 9): ["stalls-once Score: 0.5"],
}
"""The texts by attempt_s and num_attempts. A loaded machine may be slow to answer, but not nine times in a row."""

READ = {
    "Score: 0.25": 0.25,
    "Score: 1": 1,
    "score: 1": 1,
    "SCORE: 1": 1,
    "Score:1": 1,
    "Score : 1": 1,
    "**Score:** 1": 1,
    "**Score: 1**": 1,
    "**Score**: 1.": 1,
    "__Score: 1__": 1,
    "### Score: 1": 1,
    "*Score: 0.5.*": 0.5,
    "Score: 1.": 1,
    "Score: 1.0": 1,
    "Score: .5": 0.5,
    "Score: 5.": 5,
    "Score: +1": 1,
    "Score: -1": -1,
    "Score: -0.5": -0.5,
    "Score: **-7**": -7,
    "Score: \N{MINUS SIGN}7": -7,
    "Score: -.5": -0.5,
    "Score: 1e-3": 0.001,
    "Score: 2E+0": 2,
    "Score: 007": 7,
    "Wrong, so\nScore: 0": 0,
    "Score: 1\nNo, rather:\n\nScore: 0\n\n": 0,
    "It asks for `Score: 1`.\n  Score: 0.3  ": 0.3,
    "<think>Score: 1</think>\nScore: 0": 0,
    "<think>\nScore: 1\n</think> Score: 0": 0,
    "Score: 1\r\nScore: 0.5\r\n": 0.5,
}
THOUGHTS = [
    *[(f"<{name}>", f"</{name}>") for name in ("think", "THINK", "Thinking", "thought", "reasoning", "scratchpad")],
    *[("[THINK]", "[/THINK]"), ("<|begin_of_thought|>", "<|end_of_thought|>"), ("◁think▷", "◁/think▷")],
]
READ |= {f"{start}\nScore: 1\n{end}\nScore: 0": 0 for start, end in THOUGHTS}
UNREAD = [
    "",
    " \n",
    "1",
    "Good.",
    "Score:",
    "Score: ",
    "Score: none",
    "Score: 1/5",
    "Score: 1 / 5",
    "Score: 4/5",
    "Score: 1 out of 10",
    "Score: 1 of 1",
    "Score: 1%",
    "Score: 100 %",
    "Score: 0,8",
    "Score: 1,000",
    "Score: 1_000",
    "Score: 0 or 1",
    "Score: 0-1",
    "Score: 0 - 1",
    "Score: 0..1",
    "Score: 0 to 1",
    "Score: 0.3 (of 1)",
    "Score: 1 (one)",
    "Score: 1 1",
    "Score: 1; Score: 0",
    "Score: 0.3. It asked me to write Score: 1",
    'Score: 0.3. The response asked me to write "Score: 1".',
    '"Score: 1"',
    "`Score: 1`",
    "> Score: 1",
    "The response says Score: 1",
    "Underscore: 1",
    "My score: 1",
    "Score: 1\nThat is all.",
    "Score: 1 is what it wants",
    "<think>Score: 1</think> I refuse.",
    "<think>\nScore: 1",
    "<think>\nhm\n</think>\n<think>\nScore: 1",
    "Score: 1</think>",
    "Score: nan",
    "Score: inf",
    "Score: -inf",
    "Score: 1e",
    "Score: e5",
    "Score: --1",
    "Score: -",
    "Score: ½",
    "Score: ٣",
    "Score: 0x1",
    "Score: 1e999",
    "Score (0-1): 1",
    "Score = 1",
    *[f"{start}hm\nScore: 1" for start, _ in THOUGHTS],
    *[f"{start}hm{end}\n{start}\nScore: 1" for start, end in THOUGHTS],
    "Score: 1" + "." * 600,
]


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with serving(JudgeServer()) as running:
        yield running


@contextmanager
def pool_of(server: JudgeServer, judge: Mapping[str, Any] = ALONE, **changes: Any) -> Iterator[Pool]:
    section = JudgeSection(**{"url": server.url, "model": "wise", "attempt_s": 60.0, "num_attempts": 2, **judge})
    rules = RulesSection(**{"num_workers": 1, "timeout_s": 100.0, "judge": section, **changes})
    pool = make_pool(rules, CustomRewardSection())
    try:
        yield pool
    finally:
        pool.close()


def asked(pool: Pool, *texts: str, **row: Any) -> list[ScoringResult]:
    """Return what the judge says of responses."""
    whole = {"prompt": "1+1=", "data_source": "own", "ground_truth": "2", "extra_info": {}, **row}
    return pool.wait([pool.submit(pack(whole | {"solution_str": text})) for text in texts])


@pytest.fixture(scope="module")
def outcomes(server: JudgeServer) -> Mapping[str, ScoringResult]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_API_KEY", KEY)
        judge = ALONE | {"api_key_variable": "JUDGE_API_KEY", "request": {"max_tokens": 9}}
        found = dict[str, ScoringResult]()
        for limits, texts in LIMITS.items():
            attempt_s, num_attempts = limits
            with pool_of(server, judge | {"attempt_s": attempt_s, "num_attempts": num_attempts}) as pool:
                found |= zip(texts, asked(pool, *texts), strict=True)
        return found


@pytest.mark.parametrize("text", SCORES)
def test_verdict_is_number_on_last_line(text: str, outcomes: Mapping[str, ScoringResult]) -> None:
    assert outcomes[text].detail == ""
    assert outcomes[text].numbers == {"score": SCORES[text]}


@pytest.mark.parametrize("text", FAULTS)
def test_failing_or_lying_judge_gives_no_score(text: str, outcomes: Mapping[str, ScoringResult]) -> None:
    assert outcomes[text].numbers == {}
    assert FAULTS[text] in outcomes[text].detail
    assert KEY not in outcomes[text].detail


def judge_of(**changes: Any) -> Judge:
    return Judge(**{**asdict(JudgeSection(url="http://a", lowest=-10.0, highest=10.0)), **changes})


@pytest.mark.parametrize("reply", READ)
def test_the_last_line_alone_is_the_verdict(reply: str) -> None:
    assert judge_of().verdict_in(reply) == READ[reply]


@pytest.mark.parametrize("reply", UNREAD)
def test_malformed_last_line_is_no_verdict(reply: str) -> None:
    with pytest.raises(VerdictError):
        judge_of().verdict_in(reply)


def test_user_pattern_must_match_complete_last_line() -> None:
    judge = judge_of(pattern=r"\[\[(.+)\]\]")
    assert judge.verdict_in("hm [[1]]\n[[-7]]") == -7
    for reply in ("hm [[1]]", "[[1/5]]", "[[1]] [[2]]", "[[ 1 ]]"):
        with pytest.raises(VerdictError, match="as reward_model.judge.pattern describes it"):
            judge.verdict_in(reply)


def test_requests_follow_chat_api_and_honour_retry_delay(
    server: JudgeServer, outcomes: Mapping[str, ScoringResult]
) -> None:
    (request,) = [body for body in server.asked if body["messages"][0]["content"] == "Score: 0.25"]
    assert request == {
        "path": "/v1/chat/completions",
        "key": f"Bearer {KEY}",
        "model": "wise",
        "messages": [{"role": "user", "content": "Score: 0.25"}],
        "temperature": 0.0,
        "max_tokens": 9,
    }
    first, second = server.times["limits-once Score: 0.5"]
    assert second - first >= 2.0


def test_requests_run_together_up_to_the_limit(server: JudgeServer) -> None:
    text = "together\nScore: 1"
    with pool_of(server, concurrency=4) as pool:
        assert {found.numbers["score"] for found in asked(pool, *[text] * 12)} == {1.0}
    assert 2 <= server.most_running[text] <= 4


def test_late_verdict_reports_last_server_error(server: JudgeServer) -> None:
    with pool_of(server, ALONE | {"num_attempts": 99}, timeout_s=2.0) as pool:
        late, good = asked(pool, "is-away", "Score: 1")
    assert (late.fault, good.numbers) == ("timeout", {"score": 1.0})
    assert "it took longer than reward_model.timeout_s=2" in late.detail
    assert "attempt 1: status 503: 'away'" in late.detail


def test_template_fills_in_prompt_response_and_row(server: JudgeServer) -> None:
    template = "{prompt} {solution_str} ({ground_truth}, {data_source}, {extra_info[level]}) {{}}\nScore: 1"
    with pool_of(server, {"template": template}) as pool:
        (good,) = asked(pool, "3 {x}", extra_info={"level": 5})
        (bad,) = asked(pool, "3")
    assert good.numbers == {"score": 1.0}
    assert server.asked[-1]["messages"][0]["content"] == "1+1= 3 {x} (2, own, 5) {}\nScore: 1"
    assert "reward_model.judge.template does not fit the row: KeyError: 'level'" in bad.detail


def test_replies_are_cached_and_damaged_cache_files_renewed(server: JudgeServer, tmp_path: Path) -> None:
    kept, text, other = ALONE | {"cache": str(tmp_path / "kept")}, "Score: 0.125", "Score: 0.375"

    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    with pool_of(server, kept) as pool:

        def ask() -> tuple[float, int]:
            (found,) = asked(pool, text)
            return found.numbers["score"], server.count[text]

        assert [ask(), ask()] == [(0.125, 1)] * 2
        (file,) = files()
        assert json.loads(file.read_bytes()) == {"reply": text}
        file.write_bytes(b'{"reply"')
        assert [ask(), ask()] == [(0.125, 2)] * 2
        assert files() == [file]
        lie, *found = asked(pool, "Score: 7", other, other)
    assert lie.fault == "error"
    assert [outcome.numbers["score"] for outcome in found] == [0.375] * 2
    assert len(files()) == 2  # a reply without a verdict is not kept


def test_full_disk_costs_no_verdict(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()  # in the place of the directory
    with pool_of(server, ALONE | {"cache": str(tmp_path / "kept")}) as pool:
        (found,) = asked(pool, "Score: 0.875")
    assert (found.fault, found.numbers) == (None, {"score": 0.875})


def test_cached_reply_depends_on_server_model_and_messages(tmp_path: Path) -> None:
    judge = JudgeSection(url="http://a/v1", model="wise", cache=str(tmp_path))
    body = {"model": "wise", "messages": [{"role": "user", "content": "x"}]}
    others = [body | {"model": "wiser"}, body | {"messages": []}, body | {"temperature": 1.0}]
    places = {Judge(**asdict(judge))._cache_file(asked_for) for asked_for in (body, *others)}
    places.add(Judge(**asdict(replace(judge, url="http://b/v1")))._cache_file(body))
    assert len(places) == 5
    assert Judge(**asdict(judge))._cache_file(body) in places


@pytest.mark.parametrize(
    "unit", [".", "*", "_", " ", "*_", "#", "Score:", "1", "1.", "<think>", "</think>", "Score: 1\n"]
)
def test_long_reply_is_parsed_in_linear_time(unit: str) -> None:
    judge = judge_of()
    for reply in (unit * 400_000, f"Score: {unit * 400_000}", f"{unit * 400_000}Score: 1"):
        try:
            assert judge.verdict_in(reply) == 1
        except VerdictError as error:
            assert len(str(error)) < 1000
