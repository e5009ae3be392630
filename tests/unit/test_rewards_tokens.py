"""The text of a response: nothing that the policy wrote is hidden from the reward."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Fast
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from megarl.batch import Rollouts
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.scoring import RuleScorer
from tests.support.ranks import world_of_one
from tests.support.records import alone, answer, prompts

SPECIAL = ("<|end|>", "<|pad|>", "<think>", "</think>", "<answer>", "</answer>")


def tokenizer_of(special: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of bytes whose further tokens are `special` or plain."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Fast(BPE(letters, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(token, special=token in special, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>", pad_token="<|pad|>")
    return Tokenizer(wrapped, source="test", special_tokens_in_text="allow")


ALL, FEW = tokenizer_of(SPECIAL), tokenizer_of(SPECIAL[:2])
ENDS = [ALL.eos_token_id]
PERFECT = "<think>so</think><answer>4</answer>"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("4<|end|>", "4"),
        ("4", "4"),
        ("", ""),
        ("<|end|>", ""),
        ("4<|end|><|pad|><|pad|>", "4"),
        ("<answer>1<|pad|>8</answer><|end|>", "<answer>1<|pad|>8</answer>"),
        ("1<|end|>8<|end|>", "1<|end|>8"),
        ("<|pad|>18", "<|pad|>18"),
        (PERFECT, PERFECT),
        (f"{PERFECT} and more<|end|>", f"{PERFECT} and more"),
        (" 4 <|end|>", " 4 "),
    ],
)
def test_special_tokens_inside_response_stay_in_text(response: str, text: str) -> None:
    for tokenizer in (ALL, FEW):
        assert tokenizer.written(ids_of(tokenizer, response), ends=ENDS) == text


PIECE = st.sampled_from(["a", " b", "1", "é", "\n", *SPECIAL])


@given(st.lists(PIECE, max_size=8))
def test_text_is_complete_except_for_end_tokens(pieces: list[str]) -> None:
    kept = list(pieces)
    while kept and kept[-1] in ("<|end|>", "<|pad|>"):
        kept.pop()
    for tokenizer in (ALL, FEW):
        response, before = ids_of(tokenizer, "".join(pieces)), ids_of(tokenizer, "<|pad|>x <think>")
        assert tokenizer.written(response, ends=ENDS) == "".join(kept)
        assert tokenizer.written(response, ends=ENDS, before=before) == "".join(kept)


REWARD = """
def compute_score(solution_str, solution_ids, **_):
    assert all(type(token) is int for token in solution_ids)
    return {"score": len(solution_ids), "pred": solution_str}
"""


def scored(tmp_path: Path, response: Sequence[int], source: str | None, **section: Any) -> Any:
    (tmp_path / "mine.py").write_text(source or "")
    record: Rollouts = answer(prompts([1]), [len(response)])
    record.responses[:] = torch.tensor(response)
    with world_of_one():
        rules = RulesSection(num_workers=1, **section)
        decode = (
            partial(ALL.written, ends=ENDS)
            if rules.skip_special_tokens
            else partial(ALL.decode, with_special_tokens=True)
        )
        custom = CustomRewardSection(path=str(tmp_path / "mine.py") if source else None)
        scorer = RuleScorer.make(rules, custom, decode)
        found, _ = scorer.score(alone(record))
        scorer.pool.close()
    return found.share


@pytest.mark.parametrize(("skips", "custom"), product([True, False], [True, False]))
def test_reward_sees_every_token_of_response(skips: bool, custom: bool, tmp_path: Path) -> None:
    response = ids_of(ALL, f"{PERFECT}<|end|>")
    section: dict[str, Any] = {"skip_special_tokens": skips, "weights": None if custom else {"format": 1.0}}
    found = scored(tmp_path, response, REWARD if custom else None, **section)
    text = PERFECT if skips else f"{PERFECT}<|end|>"
    assert list(found.texts) == [text]
    assert found.answers == [text if custom else None]
    assert found.scores.tolist() == [float(len(response) if custom else skips)]


def test_rule_sees_special_token_between_text_parts(tmp_path: Path) -> None:
    joined, whole = (ids_of(ALL, f"#### {number}<|end|>") for number in ("1<|pad|>8", "18"))
    assert ALL.decode(joined) == ALL.decode(whole)
    section: dict[str, Any] = {"weights": {"gsm8k": 1.0}}
    record = scored(tmp_path, whole, None, **section)
    assert record.texts[0] == "#### 18"
    assert scored(tmp_path, joined, None, **section).texts[0] == "#### 1<|pad|>8"
