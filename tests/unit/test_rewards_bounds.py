"""Every rule does a bounded amount of work for any response, however small the response is."""

from typing import Any

import pytest

from megarl.rewards.built_in import RULES
from megarl.rewards.countdown import MAX_BITS, evaluate
from megarl.rewards.rules import Rules
from megarl.sandbox.pool import Pool, WorkerLimits
from megarl.sandbox.wire import pack
from tests.support.programs import run_python

CPU_S = 3
"""Most seconds of CPU time for one response here: math stops itself at one, and a loaded machine is not counted."""
TIMEOUT_S = 600.0
COUNTDOWN = [
    "(3**49999*3**49999)//(7**33000)",
    "//".join(["3**49999"] * 60),
    "*".join(["3**49999"] * 60),
    "3**49999" + "//7**33000*7**33000" * 40,
    "9**9**9",
    "-".join(["9**31000"] * 60),
    "9**31000/7**30000" * 9,
    "(((9**99)**99)**99)**99",
    "1/" * 400 + "3",
    "(1-3**.5)**99999",
]
MATH = [
    "9^{9^{9^{9}}}",
    "99999999!",
    "^".join("2" * 400),
    "(" * 490 + "5" + ")" * 490,
    "{" * 490 + "5" + "}" * 490,
    r"\log_{2}" * 120 + "5",
    "f(" * 300 + "x" + ")" * 300 + "=5",
    "a_{" * 200 + "}" * 200 + "=5",
    "5" + "^{1}" * 200,
    "5" + "'" * 900,
    r"\angle " * 120 + "A=6",
    r"\frac{" * 150 + "1" + "}{2}" * 150,
    r"\sqrt{" * 150 + "2" + "}" * 150,
    r"\cup".join(f"[{start},{start + 1}]" for start in range(0, 160, 2)),
    r"10^{10^9}-10^{10^9}+6",
    r"\sum_{k=1}^{10^8} k^2",
    r"\prod_{k=1}^{10^7} k",
    r"\binom{10^9}{5 \cdot 10^8}",
    "(x+1)^{1000}",
    r"\lfloor 10^{10^{10}} \rfloor",
    "1.5^{10^9}",
    "9999999999999999^{99999.5}",
    "e^{e^{e^{e^{e^{10}}}}}",
    r"\{" + ",".join(map(str, range(250))) + r"\}",
    "=".join(["5+x"] * 150),
]
BOMBS = {
    "countdown": [f"<answer>{text}</answer>" for text in COUNTDOWN],
    "countdown/bare": COUNTDOWN,
    "multiply": [f"<answer>{text} = 8</answer>" for text in COUNTDOWN] + ["<answer>" + "1=" * 9000 + "8</answer>"],
    "gsm8k": [
        "#### " + "9" * 9999,
        "#### 8" + " a" * 9999,
        "#### " + "1,000," * 9999,
        "#### " + "$" * 9999,
        "#### " + "(" * 9999,
    ],
    "gsm8k/flexible": ["9" * 9999, "1,000," * 9999],
    "knights_knaves": [
        "<answer>" + "Ann is a knight, " * 9999 + "</answer>",
        "| Ann " * 9999,
        "(1) " * 9999,
        "and " * 9999,
    ],
    "math": [rf"\boxed{{{text}}}" for text in MATH],
    "math_dapo": ["Answer: " + "9" * 900 + "!", "Answer: " * 9999 + "1=2"],
}
TRUTHS = {
    "countdown": {"target": 8, "numbers": [3, 5]},
    "countdown/bare": {"target": 8, "numbers": [3, 5]},
    "knights_knaves": {"names": ["Ann", "Bob"], "is_knight": [True, False]},
}


def score_all(source: str) -> None:
    """Score each response under a limit on CPU time; the kernel ends this process if a response exceeds it."""
    import resource

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    RULES[source].score(source, r"\boxed{x^2+1} <answer>1</answer>", TRUTHS.get(source, "8"), {})  # imports
    for response in BOMBS[source]:
        print(repr(response[:60]), flush=True)
        resource.setrlimit(resource.RLIMIT_CPU, (int(spent()) + CPU_S, resource.RLIM_INFINITY))
        try:
            assert RULES[source].score(source, response, TRUTHS.get(source, "8"), {}) < 1.0
        except TimeoutError:
            assert source.startswith("math")


@pytest.mark.parametrize("source", BOMBS)
def test_every_response_costs_only_seconds_of_cpu_time(source: str) -> None:
    script = f"from tests.unit.test_rewards_bounds import score_all; score_all({source!r})"
    run_python("-c", script, timeout_s=TIMEOUT_S)


def test_every_rule_with_operators_is_among_them() -> None:
    assert {RULES[source].score for source in BOMBS} == {rule.score for rule in RULES.values()} - {
        RULES["format"].score
    }


@pytest.mark.parametrize("text", COUNTDOWN)
def test_no_value_has_more_bits_than_the_bound(text: str) -> None:
    try:
        value, _ = evaluate(text)
    except ValueError:
        return
    assert not isinstance(value, int) or value.bit_length() <= MAX_BITS + len(text)


def test_slow_answer_fails_alone_and_keeps_its_process() -> None:
    def arguments(answer: str) -> Any:
        row = {"data_source": "math", "ground_truth": "5", "extra_info": {}}
        return pack(row | {"solution_str": rf"\boxed{{{answer}}}"})

    pool = Pool(Rules(), WorkerLimits(num_workers=1, timeout_s=100.0, max_memory=2_000_000_000))
    try:
        outcomes = pool.wait(
            [pool.submit(arguments(text)) for text in ("99999999!", "10/2", r"\binom{10^9}{10^8}", "4")]
        )
    finally:
        pool.close()
    late = "TimeoutError: the comparison needs more than 1 s of CPU time"
    assert [outcome.detail for outcome in outcomes] == [late, "", late, ""]
    assert [outcome.numbers.get("score") for outcome in outcomes] == [None, 1.0, None, 0.0]
