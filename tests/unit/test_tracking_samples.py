"""Samples before and now: which responses are compared."""

from megarl.tracking.samples import pairs


def row(prompt: str, response: str, score: float | None) -> dict[str, object]:
    return {"prompt": prompt, "response": response, "score": score}


def test_responses_are_compared_by_prompt_in_order() -> None:
    before = [row("a", "1", 0.0), row("a", "2", 1.0), row("b", "3", None), row("gone", "4", 0.0), {"response": "5"}]
    now = [row("b", "6", 1.0), row("new", "7", 1.0), row("a", "8", 0.5), row("a", "9", 0.5), {"prompt": "a"}]
    found = pairs(before, now)
    assert [(pair.prompt, pair.before, pair.now, pair.change) for pair in found] == [
        ("b", "3", "6", 0.0),  # without a score before there is no change
        ("a", "1", "8", 0.5),
        ("a", "2", "9", -0.5),
    ]
