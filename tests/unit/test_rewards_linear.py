"""Every rule reads a response in linear time: a quadratic rule would need hours for these responses."""

import itertools
import signal

import pytest

from megarl.rewards.built_in import RULES, rule_of
from tests.support.programs import run_python

CHARACTERS = 100_000
LIMIT_S = 2.5
"""Processor time of one response: the slowest rule takes 0.5 s at this length, and a quadratic regular expression 7."""
TIMEOUT_S = 1200.0
TAGS = ["<answer>", "</answer>", "\n", " ", "1"]
TOKENS = {
    "countdown": [*TAGS, "+(", "*"],
    "countdown/bare": [*TAGS, "+(", "*"],
    "format": ["<think>", "</think>", "<answer>", "</answer>", " "],
    "gsm8k": ["#", "#### ", " ", "1", ",", ".", "$", "-", "(", "*"],
    "gsm8k/flexible": ["1", ",", ".", "$", "-", " "],
    "knights_knaves": ["<answer>", "</answer>", " ", " and ", "Ann is a knight", "(1) ", "*", "{"],
    "math": ["\\boxed{", "\\boxed ", "{", "}", "\\", "1,\\!000"],
    "math_dapo": ["answer", ":", "Answer: 1", " ", "*", "\n", "\\boxed{", "\\["],
    "multiply": [*TAGS, "=", "1,111", "$", "."],
    "reasoning_gym/chain_sum": [*TAGS, "a"],
}
TRUTHS = {
    "countdown": {"target": 8, "numbers": [3, 5]},
    "countdown/bare": {"target": 8, "numbers": [3, 5]},
    "knights_knaves": {"names": ["Ann", "Bob"], "is_knight": [True, False]},
}


def responses(tokens: list[str]) -> list[str]:
    """Return each token and each pair of tokens, repeated, and the pairs one after the other."""

    def fill(text: str, share: float = 1.0) -> str:
        return text * int(CHARACTERS * share / len(text))

    found = [fill(token) for token in tokens]
    found += [fill(first + second) for first, second in itertools.combinations(tokens, 2)]
    return found + [fill(first, 0.5) + fill(second, 0.5) for first, second in itertools.permutations(tokens, 2)]


def read_all(source: str) -> None:
    """Score each response; the kernel ends this process if a response takes too long."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a Python handler would wait until a regular expression has ended
    for response in responses(TOKENS[source]):
        print(repr(response[:30]), repr(response[-30:]), flush=True)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        rule = rule_of(source)
        if rule and rule.answer:
            rule.answer(response)
        if source in RULES:
            RULES[source].score(source, response, TRUTHS.get(source, "8"), {})
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.mark.parametrize("source", TOKENS)
def test_a_long_response_is_read_in_time(source: str) -> None:
    script = f"from tests.unit.test_rewards_linear import read_all; read_all({source!r})"
    run_python("-c", script, timeout_s=TIMEOUT_S)


def test_every_rule_is_among_them() -> None:
    tried = {function for name in TOKENS if name in RULES for function in (RULES[name].score, RULES[name].answer)}
    assert {function for rule in RULES.values() for function in (rule.score, rule.answer)} <= tried
