"""The sequences that a reward model reads, made from prompts and responses."""

import pytest

from megarl.data.conversations import Conversations, scoring_batch
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.sentencepieces import train_sentencepiece

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}?{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model", vocab_size=200)
    return load_tokenizer(str(model), chat_template=TEMPLATE)


def conversations(tokenizer: Tokenizer, *, pad: int | None = None, max_length: int = 100) -> Conversations:
    return Conversations(tokenizer=tokenizer, pad_token_id=pad, max_length=max_length)


def test_messages_use_template_and_text_is_continued(tokenizer: Tokenizer) -> None:
    reader = conversations(tokenizer)
    messages = [{"role": "user", "content": "ab 3"}]
    expected = tokenizer.encode("user: ab 3 assistant: cd 4 ", add_special_tokens=False)
    assert reader.encode(messages, "cd 4") == expected
    assert reader.encode("ab 3", " cd 4") == tokenizer.encode("ab 3 cd 4", add_special_tokens=True)
    assert len(messages) == 1
    with pytest.raises(ValueError, match="neither a text nor a list"):
        reader.encode(None, "")


def test_long_sequence_keeps_its_end_and_begin_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_token_id == 1
    short = conversations(tokenizer, max_length=4)
    assert short.fit([1, 10, 11, 12, 13, 14]) == [1, 12, 13, 14]
    assert short.fit([9, 10, 11, 12, 13, 14]) == [11, 12, 13, 14]
    assert short.fit([1, 10, 11, 12]) == [1, 10, 11, 12]
    with pytest.raises(ValueError, match="no token"):
        short.fit([])


def test_the_score_is_read_before_pad_tokens(tokenizer: Tokenizer) -> None:
    assert conversations(tokenizer, pad=2).fit([1, 2, 10, 2, 2]) == [1, 2, 10]
    assert conversations(tokenizer, pad=2).fit([2, 2]) == [2]
    assert conversations(tokenizer).fit([1, 10, 2]) == [1, 10, 2]


def test_scored_record_has_one_state_per_sequence() -> None:
    record = scoring_batch([[5, 6, 7], [8]])
    assert record.num_tokens.tolist() == [1, 1]
    assert record.mask.all()
    assert [list(record.prompt_of(sample).token_ids) for sample in range(2)] == [[5, 6, 7], [8]]
    assert record.lengths().tolist() == [4, 2]  # includes the placeholder, which no model computes
