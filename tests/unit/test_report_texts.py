"""Remarks on the texts of a run: collapse, repetition and length are seen, good answers are not blamed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.report.read import Run
from megarl.report.summary import notes, summary
from megarl.report.texts import is_repetitive, text_notes

PROMPTS = [f"{number} + 1 =" for number in range(8)]
GOOD = [f"The sum of {number} and 1 is {number + 1}." for number in range(8)]


def run_of(first: Sequence[str], last: Sequence[str], scores: tuple[float, float] = (0.0, 0.5)) -> Run:
    """Return a run with the responses to PROMPTS at its first and its last validation."""
    samples = {
        step: [
            {"step": step, "prompt": prompt, "response": response, "score": score}
            for prompt, response in zip(PROMPTS, texts, strict=False)
        ]
        for step, texts, score in ((0, first, scores[0]), (10, last, scores[1]))
    }
    curve = [(0, scores[0]), (10, scores[1])]
    return Run(
        directory=Path("run"), curves={"val-core/sums/acc/mean@1": curve}, last_step=10, samples=samples, config={},
        history=[], skips=[], hangs=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (["3 3 3 3 3 3 3 3"] * 8, "100% of the latest validation responses are the same text, '3 3 3 3 3 3 3 3'"),
        (["I do not know."] * 5 + GOOD[5:], "62% of the latest validation responses are the same text"),
        ([f"{n} " * 40 for n in range(8)], "100% of the latest validation responses repeat a few words"),
        ([f"{text} So it is {text} Indeed, {text}" for text in GOOD], "times as long as at first"),
    ],
)
def test_rewarded_nonsense_is_not_praised(last: Sequence[str], said: str) -> None:
    run = run_of(GOOD, last)
    assert any(said in note for note in text_notes(run))
    assert [*text_notes(run)] == [*notes(run)][: len([*text_notes(run)])]
    assert "(better by the reward alone: see the remarks on its texts)" in summary(run)


@pytest.mark.parametrize(
    ("first", "last", "scores"),
    [
        (GOOD, GOOD[::-1], (0.0, 0.5)),
        (["yes", "no"] * 4, ["yes", "no"] * 4, (0.0, 0.5)),  # as short and alike as before
        (["3 3 3 3 3 3 3 3"] * 8, GOOD, (0.0, 0.5)),
        (GOOD[:3], ["same"] * 3, (0.0, 0.5)),  # too few prompts
        (GOOD, [text * 3 for text in GOOD], (0.5, 0.2)),  # longer, and not paid for it
        ([], [], (0.0, 0.5)),
    ],
)
def test_sound_texts_bring_no_remark(first: Sequence[str], last: Sequence[str], scores: tuple[float, float]) -> None:
    run = run_of(first, last, scores)
    assert not [*text_notes(run)]
    assert "reward alone" not in summary(run)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 3 3 3 3 3 3 3", True),
        ("so so so so so so so so much", True),
        ("a b " * 20, True),
        ("5" * 12, True),
        ("ha" * 20, True),
        ("!" * 11, False),
        ("the answer is 12", False),
        ("1000000005", False),
        ("一二三四五六七八九十百千", False),
        ("a rose is a rose", False),
        ("1 2 3 4 5 6 7 8 9", False),
        ("x = 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8", False),
        ("", False),
    ],
)
def test_repetition_is_of_words(text: str, expected: bool) -> None:
    assert is_repetitive(text) is expected
