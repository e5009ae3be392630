"""Files that a chat template has written already are found, and names of special tokens are counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.census import opens_a_turn
from megarl.data.config import DataSection, PreferenceDataSection, SFTDataSection
from megarl.data.conversations import Conversations
from megarl.data.order import Position
from megarl.data.pairs import PairStream
from megarl.data.preferences import PreferenceStream
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.platform.errors import UserError
from tests.support.sentencepieces import train_sentencepiece

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "A talk. The assistant thinks first.\nUser: make 3 of 1 2\nAssistant: Let me think.\n<think>"
WRITTEN = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nLet me.\n<think>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "a.model"
    return train_sentencepiece(path, control_symbols=["<|im_start|>", "<|im_end|>"], byte_fallback=True, vocab_size=700)


def tokenizer(model: Path, **options: Any) -> Tokenizer:
    return load_tokenizer(str(model), chat_template=CHATML, **options)


def rows(directory: Path, prompts: list[Any], **more: str) -> str:
    path = directory / "rows.jsonl"
    lines = [{"prompt": prompt, "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(line | more)}\n" for line in lines))
    return str(path)


def read(file: str, ours: Tokenizer) -> str:
    section = DataSection(train_files=file)
    return PromptStream(PromptDataset(section, file, ours), batch_size=1, shuffle=False, seed=1).preview_prompt(
        Position()
    )


def asked(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (PLAIN, ["data.apply_chat_template=false"]),
        (PLAIN.removesuffix(" Let me think.\n<think>"), ["data.apply_chat_template=false"]),
        (WRITTEN, ["data.apply_chat_template=false", "data.special_tokens_in_text=allow"]),
        (WRITTEN.replace("im_start", "start_header_id"), ["data.apply_chat_template=false", "data.special_tok"]),
    ],
)
def test_most_prompts_were_written_by_a_template(text: str, keys: list[str], model: Path, tmp_path: Path) -> None:
    file = rows(tmp_path, asked(text, text, "and another"))
    with pytest.raises(UserError, match=r"^2 of 3 prompts hold a chat template already; the first ends in '") as caught:
        read(file, tokenizer(model))
    assert all(key in str(caught.value) for key in keys)
    as_they_are = tokenizer(model, apply_chat_template=False, special_tokens_in_text="allow")
    assert "the content of its messages, because of" in read(file, as_they_are)
    assert read(rows(tmp_path, asked(text, "and", "another")), tokenizer(model))  # fewer than most


def test_prompt_in_own_template_needs_special_tokens_allowed(model: Path, tmp_path: Path) -> None:
    file = rows(tmp_path, [WRITTEN])
    with pytest.raises(UserError, match=r"Write data.special_tokens_in_text=allow to read"):
        read(file, tokenizer(model))
    allowing = tokenizer(model, special_tokens_in_text="allow")
    assert "\n1 of 1 rows hold names of special tokens such as '<|im_start|>': data.special_tokens_in_text=allow" in (
        read(file, allowing)
    )


def test_names_are_counted(model: Path, tmp_path: Path) -> None:
    file = rows(tmp_path, asked("a", "b <|im_end|> c", "d"))
    said = read(file, tokenizer(model))
    assert said.endswith(
        "\n1 of 3 rows hold names of special tokens such as '<|im_end|>': data.special_tokens_in_text=split reads them "
        "as letters"
    )
    assert "hold names" not in read(rows(tmp_path, asked("a", "b")), tokenizer(model))
    with pytest.raises(UserError, match=r"rows.jsonl, line 2, column prompt: the text holds .*'<\|im_end\|>', and"):
        read(rows(tmp_path, asked("a", "b <|im_end|> c")), tokenizer(model, special_tokens_in_text="error"))


def test_responses_are_counted_too(model: Path, tmp_path: Path) -> None:
    ours = tokenizer(model)
    file = rows(tmp_path, asked("a"), response="b</s>", chosen="c</s>", rejected="d")
    pairs = PairStream(SFTDataSection(train_files=file, train_batch_size=1), file, ours)
    assert "1 of 1 rows hold names of special tokens such as '</s>'" in pairs.preview_prompt(0)
    assert pairs.take(0).response_ids(0).tolist().count(ours.eos_token_id) == 1
    reader = Conversations(tokenizer=ours, pad_token_id=None, max_length=99)
    preferences = PreferenceStream(PreferenceDataSection(train_files=file, train_batch_size=1), file, reader)
    assert "1 of 1 rows hold names of special tokens such as '</s>'" in preferences.preview_prompt(0)


@pytest.mark.parametrize(
    "text",
    [
        "What is 1 + 2?",
        "User: hi\nAssistant: hello\nUser: and now?",
        "Explain what 'Assistant:' means.",
        "Complete: the assistant said <think>",
        "Question: 1 + 1\nAnswer:",
        "",
    ],
)
def test_other_texts_do_not_open_a_turn(text: str) -> None:
    assert not opens_a_turn(text)
