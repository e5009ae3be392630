"""Observations as tokens: a conversation that grows turn by turn is the one that the template would make at once."""

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import Tokenizer
from megarl.environments.encoding import Observer, as_messages

SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
START = "<|im_start|>{{ m.role }}\n"
APPENDING = {
    "chatml": START + "{{ m.content }}<|im_end|>\n",
    "without a line break": START + "{{ m.content }}<|im_end|>",
    "trims": START + "{{ m.content | trim }}<|im_end|>\n",
    "another role": "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<|im_end|>\n",
    "brackets": "{{ m.content ~ '<|im_end|>' if m.role == 'assistant' else '[INST] ' ~ m.content ~ '[/INST]' }}",
    "refuses system messages": "{{ raise_exception('no') if m.role == 'system' }}"
    + START
    + "{{ m.content }}<|im_end|>\n",
    "a default": "{{ 'You help.' if loop.first and m.role != 'system' }}" + START + "{{ m.content }}<|im_end|>\n",
}
REWRITING = {
    "removes reasoning": START + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n",
    "removes earlier reasoning": START
    + "{{ m.content if loop.index0 >= messages | length - 2 else m.content.split('</think>')[-1] }}<|im_end|>\n",
    "counts the messages": "{{ messages | length if loop.first }}" + START + "{{ m.content }}<|im_end|>\n",
    "forgets": "{% if loop.index0 >= messages | length - 3 %}" + START + "{{ m.content }}<|im_end|>\n{% endif %}",
    "marks the last": START + "{{ m.content }}{{ '!' if loop.last }}<|im_end|>\n",
    "joins": START + "{{ m.content }}{{ '<|im_end|>\n' if loop.last or m.role == 'system' }}",
    "moves system messages": "{% if m.role != 'system' %}"
    + START
    + "{{ messages[0].content ~ '\n' if loop.last and messages[0].role == 'system' }}{{ m.content }}<|im_end|>\n"
    + "{% endif %}",
}
PLAIN = {"brackets"}  # whose responses follow without a word of their own
texts = st.text("ab ,.\n<|é?", min_size=1, max_size=8).map(str.strip).filter(bool)


@cache
def tokenizer(template: str | None) -> Tokenizer:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(["user assistant system ab ab, aa. bb? <|ab|>\n\n"] * 9, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>", chat_template=template)
    return Tokenizer(wrapped, source="made by hand")


def template(name: str, message: str) -> str:
    ends = "" if name in PLAIN else "<|im_start|>model\n" if name == "another role" else "<|im_start|>assistant\n"
    return "{% for m in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}" + ends + "{% endif %}"


@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_a_conversation_grows_into_that_of_the_template(name: str, asked: str, turns: list[tuple[str, str]]) -> None:
    ours = tokenizer(template(name, APPENDING[name]))
    observer = Observer(ours)
    observer.require_appending()
    conversation = as_messages(asked)
    ids = ours.chat(conversation)
    for said, seen in turns:
        ids += [*ours.encode(said, add_special_tokens=False), ours.eos_token_id]
        ids += observer.encode(seen, prompt=as_messages(asked), last=ours.eos_token_id)
        conversation += [{"role": "assistant", "content": said}, *as_messages(seen)]
        assert ids == ours.chat(conversation)


@pytest.mark.parametrize("name", REWRITING)
def test_a_template_that_rewrites_earlier_turns_is_refused(name: str) -> None:
    ours = tokenizer(template(name, REWRITING[name]))
    observer = Observer(ours)
    with pytest.raises(ValueError, match=r"chat template does not .*append"):
        observer.require_appending()
    with pytest.raises(ValueError, match=r"chat template does not .*append"):
        observer.encode("seen", prompt=as_messages("asked"), last=ours.eos_token_id)


@given(texts)
def test_a_text_is_continued_as_it_is(seen: str) -> None:
    """Also if the tokenizer has a template: the prompt was a text."""
    ours = tokenizer(template("joins", REWRITING["joins"]))
    ids = Observer(ours).encode(seen, prompt="asked", last=ours.eos_token_id)
    assert ours.decode(ids, with_special_tokens=True) == seen


def test_turn_without_eos_gets_end_of_turn_token() -> None:
    ours = tokenizer(template("chatml", APPENDING["chatml"]))
    by_end, by_other = (
        Observer(ours).encode("b", prompt=as_messages("a"), last=last) for last in (ours.eos_token_id, 7)
    )
    assert by_other == [ours.eos_token_id, *by_end]
