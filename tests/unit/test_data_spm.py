"""User-defined symbols with blanks have the ids of SentencePiece, and directories with other ids are named."""

import json
import logging
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from megarl.data.spm import PROBES, first_difference, load_sentencepiece
from megarl.data.tokenizer import load_tokenizer
from megarl.platform.errors import UserError
from tests.support.sentencepieces import train_sentencepiece

OPTIONS = [(True, True, True), (False, False, True), (True, False, True), (False, True, True), (True, True, False)]
"""Whether extra blanks are removed, one is put before the text, and all are written as `▁`."""
SYMBOLS: list[tuple[str, ...]] = [
    ("  ",),
    ("▁▁", "▁▁▁"),
    ("▁a", "ab▁"),
    ("  ", "a▁b", " b"),
    ("  ", "   ", "    "),
    ("a  b", "  b", "b  ", "▁"),
    (" ", "b ", " a ", "▁ "),
    ("a", "ab", "bc ", " c", "12", "1", "<x>"),
]
DISJOINT: list[tuple[str, ...]] = [
    ("  ",),
    ("▁a",),
    ("▁a", "c▁b", "12"),
    (" b", "a  b", "12", "2"),
    ("<x>", "a", "xab▁b"),
]
"""Symbols that do not overlap, once a blank is `▁`."""
BLANKS = [*" ▁\t\n\u3000", "  ", "   ", "▁▁"]
LETTERS = [*"abc12<>xé½日´\u0301\u200b", "ab", "a b", "a  b", " b", "b ", "<x>", "🙂"]
TEXTS = st.lists(st.sampled_from(BLANKS) | st.sampled_from(LETTERS), max_size=12).map("".join)


@cache
def tokenizers(symbols: tuple[str, ...], escape: bool = True, **options: Any) -> tuple[SentencePieceProcessor, Any]:
    """Train a model, and return SentencePiece's own processor and the converted tokenizer."""
    with TemporaryDirectory() as directory:
        path = train_sentencepiece(
            Path(directory, "a.model"),
            vocab_size=600,
            hard_vocab_limit=False,
            user_defined_symbols=list(symbols),
            **options,
        )
        model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
        model.normalizer_spec.escape_whitespaces = escape  # training insists on it
        path.write_bytes(model.SerializeToString())
        return SentencePieceProcessor(model_file=str(path)), load_sentencepiece(path)


@pytest.mark.parametrize("rule", ["identity", "nfkc_cf"])
@pytest.mark.parametrize("kind", ["bpe", "char", "unigram"])
@settings(max_examples=400, deadline=None)
@given(st.data(), TEXTS)
def test_symbols_with_blanks_have_the_ids_of_sentencepiece(
    kind: str, rule: str, data: st.DataObject, text: str
) -> None:
    symbols = data.draw(st.sampled_from(DISJOINT if kind == "unigram" else SYMBOLS))
    removes, prefixes, escapes = data.draw(st.sampled_from(OPTIONS if rule == "identity" else OPTIONS[:2]))
    if kind == "unigram" and any(" " in symbol for symbol in symbols):
        escapes = True  # otherwise such symbols are found, and overlap
    native, ours = tokenizers(
        symbols,
        escapes,
        model_type=kind,
        byte_fallback=removes,
        normalization_rule_name=rule,
        remove_extra_whitespaces=removes,
        add_dummy_prefix=prefixes,
    )
    assert ours.encode(text, add_special_tokens=False) == native.encode(text)


@given(TEXTS)
@example("a\u0301 b\u0301")
@example("a  \u0301b")
@settings(deadline=None)
def test_normalisation_stops_at_end_of_symbol(text: str) -> None:
    native, ours = tokenizers(("a", "b ", "<x>", "  "), normalization_rule_name="nmt_nfkc")
    assert ours.encode(text, add_special_tokens=False) == native.encode(text)


@pytest.mark.parametrize("symbols", [["▁▁", "▁▁▁"], ["▁▁"], ["▁a", "ab▁"], ["\n", "\n\n"], ["ab", "ba"]])
def test_a_unigram_model_with_overlapping_symbols_is_refused(symbols: list[str], tmp_path: Path) -> None:
    path = train_sentencepiece(
        tmp_path / "a.model",
        model_type="unigram",
        vocab_size=400,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        user_defined_symbols=symbols,
    )
    with pytest.raises(UserError, match=r"a\.model: the user-defined symbols \[.*\] overlap.* model_type=bpe"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("symbols", "kind", "rule", "fault"),
    [
        (["\u0301x"], "bpe", "nfkc", "its normalisation rewrites the user-defined symbols"),
        (["a<0x"], "unigram", "identity", r"confuse the user-defined symbols \['a<0x'\] with bytes"),
    ],
)
def test_other_symbols_without_a_counterpart_are_refused(
    symbols: list[str], kind: str, rule: str, fault: str, tmp_path: Path
) -> None:
    path = train_sentencepiece(
        tmp_path / "a.model",
        model_type=kind,
        vocab_size=600,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name=rule,
        user_defined_symbols=symbols,
    )
    with pytest.raises(UserError, match=fault):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("symbols", "added", "fault"),
    [
        ([], {"+1": 0, "1+": 0}, r"several of its pieces have the same score.* reads '1\+1' otherwise"),
        (["<x>"], {"qab": -500}, r"its merges lead to other pieces than \['qab'\]"),
    ],
)
def test_pieces_that_merges_cannot_express_are_refused(
    symbols: list[str], added: dict[str, float], fault: str, tmp_path: Path
) -> None:
    path = train_sentencepiece(tmp_path / "a.model", normalization_rule_name="identity", user_defined_symbols=symbols)
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    for piece, score in added.items():
        model.pieces.add(piece=piece, score=score, type=1)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=rf"a\.model: {fault}.* name a directory with tokenizer\.json"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    "tied", [["aaab", "aabb"], ["\u2581" * length for length in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15)]]
)
def test_equal_scores_that_change_no_text_are_read(tied: list[str], tmp_path: Path) -> None:
    """Llama's models have fifteen runs of blanks with the same score."""
    path = train_sentencepiece(tmp_path / "a.model", normalization_rule_name="identity", remove_extra_whitespaces=False)
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    for piece in tied:
        model.pieces.add(piece=piece, score=-1e9, type=1)
    path.write_bytes(model.SerializeToString())
    tokenizer, library = load_tokenizer(str(path)), SentencePieceProcessor(model_file=str(path))
    rng = random.Random(0)
    texts = ["".join(rng.choices(["a", "b", " ", "  ", " " * 9], k=rng.randint(0, 12))) for _ in range(2000)]
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == library.encode(texts)


CONFIGS: list[dict[str, Any]] = [
    {},
    {"chat_template": "{{ messages }}"},
    {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_directory_differing_from_sentencepiece_model_is_named_once(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = train_sentencepiece(tmp_path / "tokenizer.model", vocab_size=600, byte_fallback=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    native = SentencePieceProcessor(model_file=str(model))
    with caplog.at_level(logging.WARNING, "megarl"):
        tokenizer, _ = (load_tokenizer(str(tmp_path)) for _ in range(2))
    text = "3 apples"
    ours = tokenizer.encode(text, add_special_tokens=False)
    (warning,) = caplog.messages
    assert f"{text!r} becomes {ours}, in the sentencepiece library {native.encode(text)}" in warning
    assert f"data.tokenizer={model}" in warning
    assert "tokenizer.json" in warning

    caplog.clear()
    tokenizer.save(tmp_path)
    again, of_the_library = load_tokenizer(str(tmp_path)), load_tokenizer(str(model))
    assert not caplog.messages
    assert again.encode(text, add_special_tokens=False) == ours
    assert of_the_library.encode(text, add_special_tokens=False) == native.encode(text)


def test_equal_ids_and_other_formats_are_no_difference(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "tokenizer.model")
    assert first_difference(path, SentencePieceProcessor(model_file=str(path)).encode(list(PROBES))) == ""
    assert "in the sentencepiece library" in first_difference(path, [[1]] * len(PROBES))
    path.write_text("IQ== 0\nIg== 1\n")  # as of tiktoken
    assert first_difference(path, [[1]] * len(PROBES)) == ""
