"""A converted tokenizer gives the ids of SentencePiece under each of its normalisation tables, for any text."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.data.spm import load_sentencepiece
from megarl.platform.errors import UserError

RULES = ["identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog, and the cat sat there",
    "été ñandú straße Grüße fi ŝ Å ự",
    "日本語のテキスト ガギグ ばぱ",
    "안녕하세요 한국어 문장",
    "مرحبا بالعالم لَا",
    "हिन्दी क़ भाषा ไทยำ",
    "👩\u200d👩\u200d👧 👍🏽 🇩🇪 ½ ① ㌀",
]
MARKS = "\u0300\u0301\u0307\u0308\u0323\u0328\u0338\u0345\u064b\u0653\u093c\u094d\u0e33\u302a\u3099\u309a\uff9e\uff9f"
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\ufe0f\u2028\u0085\u3000\u00a0\x01\x7f\r\n\t "
SCRIPTS = (
    "aAſÅéﬁﷺ½①㌀🅉ｶガか\u1100\u1161\u11a8\u110f한가ㄱㅏﾡￂ日本豈ابلक़काกทγ\u1f71🇩🇪👩👍🏽\U0001e068\U00016d67～〜▁<>0x41"
)
NONCHARACTERS = "".join(chr(0x10000 * plane + last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.sampled_from(INVISIBLE),
        st.sampled_from(SCRIPTS),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0" + NONCHARACTERS),
        st.sampled_from(SENTENCES),
    ),
    max_size=25,
).map("".join)


@cache
def tokenizers(rule: str, **options: Any) -> tuple[Any, Any]:
    """Train a model, and return SentencePiece's own processor and the converted tokenizer."""
    with TemporaryDirectory() as directory:
        file = Path(directory, "m.model")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 4),
            model_prefix=str(file.with_suffix("")),
            vocab_size=600,
            hard_vocab_limit=False,
            normalization_rule_name=rule,
            minloglevel=2,
            **options,
        )
        return sentencepiece.SentencePieceProcessor(model_file=str(file)), load_sentencepiece(file)


@pytest.mark.parametrize("rule", RULES)
@given(text=TEXTS)
@example("①\u0301 é\u0301 A\u0302\u0323 A\u0323\u0302")
@example("\u1112\u1161\u11ab\u11ab ガ ｶﾞ が")
@example("α\u0345 \u0345 α\u0301\u0345\u0345")
@example("½\x01a \u200be\u0301\u200d\r\n👩\u200d👧")
@settings(deadline=None)
def test_the_ids_are_those_of_sentencepiece(rule: str, text: str) -> None:
    for options in ({"byte_fallback": True}, {"remove_extra_whitespaces": False, "add_dummy_prefix": False}):
        theirs, ours = tokenizers(rule, model_type="bpe", **options)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


@pytest.mark.parametrize("rule", RULES)
@given(text=TEXTS)
@settings(deadline=None)
def test_unigram_segmentation_is_equally_likely(rule: str, text: str) -> None:
    theirs, ours = tokenizers(rule, model_type="unigram")
    ids = ours.encode(text, add_special_tokens=False)
    assert "".join(theirs.id_to_piece(i) for i in ids) == "".join(theirs.id_to_piece(i) for i in theirs.encode(text))
    assert sum(map(theirs.get_score, ids)) == pytest.approx(sum(map(theirs.get_score, theirs.encode(text))), abs=1e-3)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"ä": "ae", "ß": "ss", "\u200d": ""}, "ä\u0301ß\u200d\u0301"),
        ({"a\u0301": "á", "Å": "å", "!?": "‽"}, "a\u0301\u0301Å!!?ä!?!"),
    ],
)
def test_own_rules_are_followed(tmp_path: Path, rules: dict[str, str], text: str) -> None:
    theirs, ours = tokenizers_of(tmp_path, rules)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


@pytest.mark.parametrize("rules", [{"ab": "ba", "b": "c"}, {"...": "…"}])
def test_inexpressible_normalisation_rules_are_refused(tmp_path: Path, rules: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"own\.model: its normalisation has rules of several characters"):
        tokenizers_of(tmp_path, rules)


def tokenizers_of(directory: Path, rules: dict[str, str]) -> tuple[Any, Any]:
    table = directory / "rules.tsv"
    lines = ["\t".join(" ".join(f"{ord(c):X}" for c in side) for side in rule) for rule in rules.items()]
    table.write_text("\n".join(lines) + "\n")
    file = directory / "own.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_prefix=str(file.with_suffix("")),
        vocab_size=600,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_tsv=str(table),
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(file)), load_sentencepiece(file)
