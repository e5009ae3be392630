"""The prompts that go through the chat template, the text that the model reads, and invalid prompts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.census import Census
from megarl.data.conversations import Conversations
from megarl.data.messages import SHOWN_CHARACTERS, as_read, as_written, encode_prompt, prompt_faults
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.sentencepieces import train_sentencepiece

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}?{% endif %}"
TEXT = "ab 12"
ONE = [{"role": "user", "content": TEXT}]
TWO = [{"role": "system", "content": "add"}, *ONE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    return str(train_sentencepiece(path, byte_fallback=True, vocab_size=550))


@pytest.mark.parametrize(
    ("template", "applied", "prompt", "read"),
    [
        (TEMPLATE, None, TEXT, f"<s> {TEXT}"),
        (TEMPLATE, None, ONE, f"user: {TEXT} ?"),
        (TEMPLATE, None, TWO, f"system: add user: {TEXT} ?"),
        (TEMPLATE, True, TEXT, f"user: {TEXT} ?"),
        (TEMPLATE, True, ONE, f"user: {TEXT} ?"),
        (TEMPLATE, False, TEXT, f"<s> {TEXT}"),
        (TEMPLATE, False, ONE, f"<s> {TEXT}"),
        (TEMPLATE, False, TWO, f"<s> add\n{TEXT}"),
        (None, None, TEXT, f"<s> {TEXT}"),
        (None, None, ONE, f"<s> {TEXT}"),
        (None, False, TWO, f"<s> add\n{TEXT}"),
    ],
)
def test_the_text_that_the_model_reads(
    model: str, template: str | None, applied: bool | None, prompt: Any, read: str
) -> None:
    tokenizer = load_tokenizer(model, chat_template=template, apply_chat_template=applied)
    token_ids = encode_prompt(prompt, tokenizer)
    assert token_ids == tokenizer.encode(read.removeprefix("<s> "), add_special_tokens=read.startswith("<s>"))
    assert " ".join(read.split()) in as_read("the first prompt", prompt, token_ids, tokenizer)
    # a model that scores reads prompts in the same way, followed by the response
    scored = Conversations(tokenizer=tokenizer, pad_token_id=None, max_length=99).encode(prompt, " cd")
    words = read.removeprefix("<s> ").removesuffix("?").split()
    behind = ["assistant:", "cd"] if tokenizer.templates(prompt) else ["cd"]
    assert tokenizer.decode(scored).split() == [*words, *behind]


def test_prompt_display_states_reading_and_is_bounded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", secret := "hf_" + "b" * 34)

    def shown(prompt: Any, **options: Any) -> str:
        tokenizer = load_tokenizer(model, **options)
        return as_read("the first prompt", prompt, encode_prompt(prompt, tokenizer), tokenizer)

    assert "through the chat template:" in shown(ONE, chat_template=TEMPLATE)
    assert "as the tokenizer has no chat template (data.chat_template" in shown(ONE)
    assert "because of data.apply_chat_template=false:" in shown(ONE, chat_template=TEMPLATE, apply_chat_template=False)
    assert "a text as it is:" in shown(TEXT, chat_template=TEMPLATE)
    giant = shown("begin " + "1 2 " * SHOWN_CHARACTERS + secret + " end")
    assert len(giant) < 2 * SHOWN_CHARACTERS + 200
    assert "begin 1 2" in giant
    assert giant.endswith("*** end")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3)
contents = scalars | st.lists(st.fixed_dictionaries({"type": st.text(max_size=5)}), max_size=2)
roles = st.sampled_from(["system", "user", "assistant", "tool"]) | scalars
messages = st.fixed_dictionaries({}, optional={"role": roles, "content": contents}) | scalars
prompts = scalars | st.text() | st.lists(messages, max_size=3) | messages


@given(prompt=prompts, applied=st.sampled_from([None, False, True]))
def test_a_prompt_is_either_faulty_or_read(readers: dict[bool | None, Tokenizer], prompt: Any, applied: Any) -> None:
    faults = list(prompt_faults(prompt))
    try:
        token_ids = encode_prompt(prompt, readers[applied])
    except ValueError as error:
        assert str(error) in (*faults, "the prompt has no token")
    else:
        assert not faults
        assert token_ids


@pytest.fixture(scope="module")
def readers(model: str) -> dict[bool | None, Tokenizer]:
    return {
        applied: load_tokenizer(model, chat_template=TEMPLATE, apply_chat_template=applied)
        for applied in (None, False, True)
    }


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        (None, "None is neither a text nor a list of messages"),
        ({"role": "user", "content": "1"}, "neither a text nor a list"),
        ([], "neither a text nor a list"),
        ("", "the text is empty"),
        ("a\ud800", "the text has half a character .* at position 1"),
        (["1"], "message 0: '1' is not {role, content}"),
        ([*ONE, {"from": "human", "value": "1"}], "message 1: role None is none of system, developer, user"),
        ([{"role": "human", "content": "1"}], "message 0: role 'human' is none of"),
        ([{"role": "user"}], "message 0: content: a text is expected, not None"),
        ([{"role": "user", "content": 7}], "message 0: content: a text is expected, not 7"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0: .*images, audio and video are not supported"),
    ],
)
def test_invalid_prompts_are_reported(readers: dict[bool | None, Tokenizer], prompt: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        encode_prompt(prompt, readers[None])


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_call_of_a_tool_needs_no_content(readers: dict[bool | None, Tokenizer], content: dict[str, Any]) -> None:
    called: list[Any] = [*ONE, {"role": "assistant", **content, "tool_calls": [{"function": {"name": "add"}}]}]
    assert not list(prompt_faults(called))
    assert encode_prompt(called, readers[False])
    assert as_written("said", called).endswith("assistant: ")
    Census(readers[False]).see(called)
