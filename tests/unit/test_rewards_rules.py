r"""The small rule rewards, by hand: multiply, knights_knaves, format."""

import pytest

from megarl.rewards.built_in import RULES


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>408</answer>", 1.0),
        ("12 * 34 = 400 <answer> 12 * 34 = 408 </answer>", 1.0),
        ("<answer>1</answer> no, <answer>408</answer>", 1.0),
        ("so it is\n408\n", 1.0),
        ("12 * 34 = 408", 1.0),
        ("<answer>409</answer>", 0.1),
        ("<answer>408</answer> no, <answer>-408</answer>", 0.1),
        ("409", 0.0),
        ("<answer>12*34</answer>", 0.0),
        ("<answer>4,08</answer>", 0.0),
        ("<answer>" + "9" * 100_000 + "</answer>", 0.0),
        ("<think>in <answer> tags</think><answer>408</answer>", 1.0),
        ("<answer>408</answer> as asked in </answer>", 1.0),
        ("<answer>408.</answer>", 1.0),
        ("<answer>$408$</answer>", 1.0),
        ("<answer>$408.</answer>", 1.0),
        ("<answer>408.0</answer>", 1.0),
        ("<answer>408.00</answer>", 1.0),
        ("<answer>**408**</answer>", 1.0),
        ("<answer>+408</answer>", 1.0),
        ("<answer>409.</answer>", 0.1),
        ("<answer>4.08</answer>", 0.0),
        ("<answer>408.5</answer>", 0.0),
        ("<answer>.</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_multiply(response: str, score: float) -> None:
    assert RULES["multiply"].score("multiply", response, 408, None) == score


def test_multiply_reads_thousands_and_ground_truths_as_text() -> None:
    assert RULES["multiply"].score("multiply", "<answer>1,234,567</answer>", "1234567", None) == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>(1) Zoey is a knight, (2) Oliver is a knave</answer>", 1.0),
        ("<answer>\nOLIVER is the knave.\nzoey is a Knight.\n</answer>", 1.0),
        ("Oliver is a knight?\nZoey is a knight and Oliver is a knave.", 1.0),
        ("<answer>Zoey is a knight, Oliver is a knight</answer>", 0.1),
        ("Zoey is a knight, Oliver is a knight", 0.0),
        ("<answer>Zoey is a knight</answer>", 0.0),
        ("<answer>Zoey is a knight, Zoey is a knave, Oliver is a knave</answer>", 0.0),
        ("<answer>Zoey is a knight, Oliver is a knave, Emma is a knave</answer>", 0.0),
        ("<answer>**Zoey** is a **knight** and **Oliver** is a **knave**</answer>", 1.0),
        ("<answer>1. Zoey is a knight\n2. Oliver is a knave</answer>", 1.0),
        ("<answer>- Zoey is a knight\n- Oliver is a knave</answer>", 1.0),
        ("<answer>(1) Zoey is a knight (2) Oliver is a knave</answer>", 1.0),
        ("<answer>Therefore, Zoey is a knight, and Oliver is the knave.</answer>", 1.0),
        ("<answer>The answer is: Zoey is a knight, while Oliver is knave</answer>", 1.0),
        ("<answer>Zoey is not a knight, Oliver is a knave</answer>", 0.0),
        ("<answer>It is not true that Zoey is a knight and Oliver is a knave</answer>", 0.0),
        ("<answer>It is false: Zoey is a knight, Oliver is a knave</answer>", 0.0),
        ("<answer>If Zoey is a knight then Oliver is a knave</answer>", 0.0),
        ("<answer>If Zoey is a knight, Oliver is a knave</answer>", 0.0),
        ("<answer>Zoey is a knight if Oliver is a knave</answer>", 0.0),
        ("<answer>Unless Zoey is a knight, Oliver is a knave</answer>", 0.0),
        ("<answer>Either Zoey is a knight, or Oliver is a knave</answer>", 0.0),
        ("<answer>Zoey is a knight or Oliver is a knave</answer>", 0.0),
        ("<answer>Suppose Zoey is a knight. Then Oliver is a knave</answer>", 0.0),
        ("<answer>Is it that Zoey is a knight, Oliver is a knave?</answer>", 0.0),
        ("<answer>Zoey is a knight? Oliver is a knave</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_knights_knaves(response: str, score: float) -> None:
    truth = {"names": ["Zoey", "Oliver"], "is_knight": [True, False]}
    assert RULES["knights_knaves"].score("knights_knaves", response, truth, None) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>two and two</think>\n<answer>4</answer>", 1.0),
        (" two and two</think> <answer>4</answer>\n", 1.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>hm</think><answer> </answer>", 0.0),
        ("<think>hm</think>so<answer>4</answer>", 0.0),
        ("<think>hm</think><answer>4</answer>.", 0.0),
        ("<answer>4</answer><think>hm</think>", 0.0),
        ("<think>hm</think><answer>4</answer><answer>5</answer>", 0.0),
        ("hm<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(response: str, score: float) -> None:
    assert RULES["format"].score("format", response, None, None) == score
