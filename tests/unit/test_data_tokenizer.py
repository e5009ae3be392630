"""Tokenizers: SentencePiece's own library, ours, and the saved files in transformers agree id for id."""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.assets import asset
from tests.support.sentencepieces import WORDS, train_sentencepiece

SIZES = {"small": 300, "large": 400}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "vocab_size": 300},
    "unigram_bytes": {"model_type": "unigram", "vocab_size": 550, "byte_fallback": True},
    "unigram_verbatim": {
        "model_type": "unigram",
        "vocab_size": 300,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n", "<x>"],
        "add_dummy_prefix": False,
    },
    "unigram_lines": {
        "model_type": "unigram",
        "vocab_size": 560,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<x>"],
    },
    "bpe": {},
    "bpe_lines": {
        "vocab_size": 600,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<x>"],
        "control_symbols": ["<|end|>"],
    },
    "bpe_bytes": {"vocab_size": 600, "byte_fallback": True, "split_digits": True, "bos_id": -1},
    "bpe_verbatim": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n", "<x>", "12"],
    },
    "char": {"model_type": "char", "vocab_size": 40, "hard_vocab_limit": False},
}


PARTS = [
    *"ab12+ \n\t\r\0\x1b\x85",
    "  ",
    "\u2581",
    "<x>",
    "<s>",
    "</s>",
    "<unk>",
    "<|end|>",
    "<0x41>",
    "<0x0A>",
    "<0x4",
]
PARTS += [*"é漢İß\u200b\ufeff\u2028\u3000\ue000\U0010ffff", "ﬁ", "½", "한", "🙂", "👩\u200d🚀"]
spelt = st.lists(st.sampled_from(PARTS) | st.characters(categories=["L", "N", "P", "S"]), max_size=8).map("".join)


def random_texts(count: int) -> list[str]:
    rng = random.Random(2)
    letters = "abcaaa 1112+\n\u2581<x>é漢🙂\t  "
    odd = ["\n", "<x>", "  ", "é", "漢字", "🙂", "\t", "ﬁ"]
    return [
        "".join(rng.choices(letters, k=rng.randint(0, 15)))
        if rng.random() < 0.5
        else " ".join(rng.choices(WORDS + odd * 5, k=rng.randint(0, 10)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_saved_sentencepiece_tokenizer_keeps_ids_in_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "small.model", **options)
    native = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = load_tokenizer(str(model))
    ours.save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))

    bos = [native.bos_id()] if native.bos_id() >= 0 else []
    for text in random_texts(1000):
        ids = native.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text, add_special_tokens=True) == bos + ids
        assert saved.encode(text) == again.encode(text, add_special_tokens=True) == bos + ids
        assert saved.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        if native.unk_id() not in ids and not text.lstrip().startswith("\u2581"):  # it strips each at the start
            assert ours.decode([*bos, *ids, native.eos_id()]) == native.decode(ids)
    assert ours.vocab_size == again.vocab_size == len(saved) == native.vocab_size()
    assert (ours.eos_token_id, saved.eos_token_id) == (native.eos_id(), native.eos_id())
    assert ours.bos_token_id == saved.bos_token_id == (bos[0] if bos else None)


@cache
def both(name: str) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    with TemporaryDirectory() as directory:
        path = train_sentencepiece(Path(directory) / "a.model", **MODELS[name])
        return sentencepiece.SentencePieceProcessor(model_file=str(path)), load_tokenizer(str(path))


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].get("normalization_rule_name") == "identity"])
@settings(max_examples=300)
@given(spelt)
@example("\n 🙂")
@example("<0x41><x><0x0A>")
def test_any_text_has_the_ids_of_sentencepiece(name: str, text: str) -> None:
    """Only `identity` models: under a table of normalisation, fast tokenizers process graphemes."""
    native, ours = both(name)
    assert ours.encode(text, add_special_tokens=False) == native.encode(text)


def test_a_directory_with_only_a_sentencepiece_model_loads(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("3 * 7", add_special_tokens=True)) == "3 * 7"


def test_chat_template_is_rendered_and_saved(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "small.model", control_symbols=["<|user|>", "<|assistant|>"])
    tokenizer = load_tokenizer(str(model), chat_template=TEMPLATE)
    ids = tokenizer.chat([{"role": "user", "content": "3 5 = 8"}])
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    body = pieces.encode("3 5 = 8")
    assert ids == [pieces.piece_to_id("<|user|>"), *body, pieces.eos_id(), pieces.piece_to_id("<|assistant|>")]
    assert tokenizer.decode(ids) == "3 5 = 8"

    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).chat([{"role": "user", "content": "3 5 = 8"}]) == ids


def test_template_variables_reach_prompts_and_saved_files(tmp_path: Path) -> None:
    model = str(train_sentencepiece(tmp_path / "small.model", control_symbols=["<|user|>", "<|assistant|>"]))
    thinks = TEMPLATE + "{% if think is defined and think is false %}3{% endif %}"
    message = [{"role": "user", "content": "1"}]
    plain = load_tokenizer(model, chat_template=thinks)
    tokenizer = load_tokenizer(model, chat_template=thinks, chat_template_kwargs={"think": False})
    three = plain.encode("3", add_special_tokens=False)
    assert tokenizer.chat(message) == [*plain.chat(message), *three]
    assert tokenizer.digest != plain.digest
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).chat(message) == tokenizer.chat(message)
    read_elsewhere = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert read_elsewhere.apply_chat_template(message, tokenize=False).endswith("3")
    assert not read_elsewhere.apply_chat_template(message, tokenize=False, think=True).endswith("3")
    with pytest.raises(ValueError, match="small.model has no chat template"):
        load_tokenizer(model, chat_template_kwargs={"think": False})


def test_chat_template_may_be_file_and_must_exist(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "small.model")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    message = [{"role": "user", "content": "1"}]
    assert load_tokenizer(str(model), chat_template=str(tmp_path / "own.jinja")).chat(message)
    with pytest.raises(ValueError, match=r"apply_chat_template=true, but .*small.model has no chat template"):
        load_tokenizer(str(model), apply_chat_template=True)
    with pytest.raises(ValueError, match=r"neither a Jinja template nor a file"):
        load_tokenizer(str(model), chat_template="absent.jinja")
    refuses = load_tokenizer(str(model), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        refuses.chat(message)


def test_inexactly_convertible_model_is_refused(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "newline.model", user_defined_symbols=["\n"])
    with pytest.raises(ValueError, match=r"user-defined symbols \['\\n'\]; train it with normalization_rule_name"):
        load_tokenizer(str(model))
    word = train_sentencepiece(tmp_path / "word.model", model_type="word", vocab_size=100)
    with pytest.raises(ValueError, match="not word"):
        load_tokenizer(str(word))
    garbage = tmp_path / "garbage.model"
    for content in (b"no model", b""):
        garbage.write_bytes(content)
        with pytest.raises(ValueError, match="is not a SentencePiece model"):
            load_tokenizer(str(garbage))


def test_a_path_that_holds_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file or directory: .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no such file: .*nowhere.model"):
        load_tokenizer(str(tmp_path / "nowhere.model"))
    with pytest.raises(ValueError, match="data.tokenizer takes a directory"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "endless.model", eos_id=-1)
    with pytest.raises(ValueError, match=r"endless.model has no end-of-sequence token"):
        load_tokenizer(str(model))


def test_real_llama_style_directory() -> None:
    directory = asset("models/stories260K-hd32")
    tokenizer = load_tokenizer(str(directory))
    from_model = load_tokenizer(str(directory / "tokenizer.model"))
    for text in ["Once upon a time, there was a little girl.", "  two  spaces\n\nand é漢🙂", ""]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids[0] == tokenizer.bos_token_id == 1
        assert from_model.encode(text, add_special_tokens=True) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 512


def test_model_without_tokenizer_is_named_without_further_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=rf"^{tmp_path} has no tokenizer: data.tokenizer takes a directory with"):
        load_tokenizer(str(tmp_path))


def test_tokens_with_other_numbers_are_named(tmp_path: Path) -> None:
    models = {name: train_sentencepiece(tmp_path / f"{name}.model", vocab_size=size) for name, size in SIZES.items()}
    small, large = (load_tokenizer(str(models[name])) for name in ("small", "large"))
    assert small.differences(small) == ""
    assert small.differences(large).endswith(" ...")
    assert f" of {small.vocab_size} differ: " in small.differences(large)
