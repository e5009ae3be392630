"""A reader with other tokens sees the text so far, as much as its complete tokens cover, and never more."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch import Prompt, Rollouts, Scored
from megarl.data.messages import encode_prompt
from megarl.data.tokenizer import HALF, Tokenizer, load_tokenizer
from megarl.data.translation import Translation
from megarl.platform.deadline import computing_at_most
from tests.support.sentencepieces import train_sentencepiece

VERBATIM = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "coarse": {**VERBATIM, "vocab_size": 700},
    "fine": {**VERBATIM, "vocab_size": 330},
    "other": {**VERBATIM, "vocab_size": 600, "model_type": "unigram"},
}
TEXTS = st.text(alphabet="abcde 12+=é漢🙂", min_size=1, max_size=24)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: load_tokenizer(str(train_sentencepiece(root / f"{name}.model", **options)))
        for name, options in MODELS.items()
    }


def tokens_of(batch: Rollouts, sample: int) -> list[int]:
    tokens: list[int] = batch.select(torch.tensor([sample])).tokens().tolist()
    return tokens


def rollouts(writer: Tokenizer, prompt: Any, answers: list[list[int]]) -> Rollouts:
    """Return the given responses to one prompt."""
    responses = torch.tensor(sum(answers, []), dtype=torch.int32)
    row = Prompt(
        index=7,
        token_ids=encode_prompt(prompt, writer) if isinstance(prompt, str) else [3],
        text="",
        data_source="",
        ground_truth=None,
        extra_info={},
        raw_prompt=prompt,
    )
    return Rollouts(
        prompts=[row],
        groups=torch.zeros(len(answers), dtype=torch.int64),
        num_tokens=torch.tensor([len(answer) for answer in answers]),
        responses=responses,
        mask=torch.ones_like(responses, dtype=torch.bool),
        rollout_log_probs=None,
        truncated=torch.zeros(len(answers), dtype=torch.bool),
    )


@settings(deadline=None, max_examples=60)
@given(prompt=TEXTS, answer=TEXTS, writer=st.sampled_from(list(MODELS)), reader=st.sampled_from(list(MODELS)))
def test_state_covers_all_complete_tokens_so_far(
    tokenizers: dict[str, Tokenizer], prompt: str, answer: str, writer: str, reader: str
) -> None:
    writes, reads = tokenizers[writer], tokenizers[reader]
    written = writes.encode(answer, add_special_tokens=False) + [writes.eos_token_id]
    batch = rollouts(writes, prompt, [written, written[:1]])
    read = Translation(writer=writes, reader=reads)(batch)
    assert read.sequences is not None
    begin = len(encode_prompt(prompt, reads))
    own = reads.encode(answer, add_special_tokens=False)
    assert tokens_of(read, 0) == [*encode_prompt(prompt, reads), *own, reads.eos_token_id]
    for place, so_far in zip(read.rows(read.predictors())[0].tolist(), range(len(written)), strict=True):
        texts = [writes.decode(written[:end]) for end in range(so_far + 1)]
        text = [text for text in texts if not text.endswith(HALF)][-1]  # a part of a character does not count yet
        seen = place + 1 - begin
        assert text.startswith(reads.decode(own[:seen]))
        assert seen == len(own) or len(reads.decode(own[: seen + 1])) > len(text)
    assert int(read.lengths().sum()) == len(read.sequences)


def test_bytes_that_are_no_text_take_linear_time(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["fine"]
    [piece] = [token for token in range(300) if tokenizer.decode([token, token]) == HALF * 2][:1]
    end = tokenizer.encode("ab", add_special_tokens=False)
    ids = [*[piece] * 20_000, *end]
    with computing_at_most(10.0):
        reached = tokenizer.reach(ids, half=0)
    assert reached[-1] == len(tokenizer.decode(ids))
    assert reached == sorted(reached)


def test_reader_with_same_tokenizer_reads_same_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    same = tokenizers["coarse"]
    answers = [same.encode(text, add_special_tokens=False) + [same.eos_token_id] for text in ("a 12 + 7", "hkb")]
    batch = rollouts(same, "3 18 5 = 20 :", answers)
    read = Translation(writer=same, reader=same)(batch)
    assert [tokens_of(read, row) for row in range(2)] == [tokens_of(batch, row) for row in range(2)]
    assert torch.equal(read.predictors(), batch.predictors())
    chosen = read.select(torch.tensor([1]))
    assert tokens_of(chosen, 0) == tokens_of(batch, 1)


def test_same_responses_are_translated_once(tokenizers: dict[str, Tokenizer]) -> None:
    writer = tokenizers["coarse"]
    first, second = (rollouts(writer, "3 18", [writer.encode(text, add_special_tokens=False)]) for text in ("ab", "cd"))
    translation = Translation(writer=writer, reader=tokenizers["fine"])
    read = translation(first)
    later = first.extend(Scored, texts=["ab"], scores=torch.ones(1), accuracies=torch.ones(1))
    assert translation(later).sequences is read.sequences
    assert isinstance(translation(later), Scored)
    assert translation(second).tokens().tolist() != read.tokens().tolist()
    assert translation(first).tokens().tolist() == read.tokens().tolist()


def test_a_prompt_that_cannot_be_read_is_named(tokenizers: dict[str, Tokenizer]) -> None:
    translation = Translation(writer=tokenizers["fine"], reader=tokenizers["other"])
    with pytest.raises(ValueError, match=r"the critic cannot read data row 7: message 0: role None is none of"):
        translation(rollouts(tokenizers["fine"], [{"from": "human", "value": "a"}], [[5]]))
    with pytest.raises(ValueError, match="data row 7: None is neither a text nor a list"):
        translation(rollouts(tokenizers["fine"], None, [[5]]))
