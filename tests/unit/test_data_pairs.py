"""Supervised pairs: the tokens that have a loss, and invalid pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.config import SFTDataSection
from megarl.data.pairs import PairStream
from megarl.data.parquet import write_rows
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.sentencepieces import train_sentencepiece

PAIRS = [{"prompt": f"{number} 5 =", "response": f"{number} + 5"} for number in (1, 22, 3, 4, 55)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model")))


def stream(tmp_path: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], **changes: Any) -> PairStream:
    write_rows(tmp_path / "sft.parquet", rows)
    file = str(tmp_path / "sft.parquet")
    section = SFTDataSection(**{"train_files": file, "train_batch_size": 2, "max_length": 16, **changes})
    return PairStream(section, file, tokenizer)


def test_a_batch_holds_responses_that_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = stream(tmp_path, tokenizer, PAIRS, shuffle=False)
    assert pairs.steps_per_epoch == 2
    batch = pairs.take(1)
    assert [prompt.index for prompt in batch.prompts] == [2, 3]
    assert batch.prompt_of(1).token_ids == tokenizer.encode("4 5 =", add_special_tokens=True)
    response = [*tokenizer.encode("3 + 5", add_special_tokens=False), tokenizer.eos_token_id]
    assert batch.response_ids(0).tolist() == response
    assert torch.equal(
        batch.lengths(), torch.tensor([len(batch.prompt_of(i).token_ids) for i in range(2)]) + batch.num_tokens
    )
    assert batch.mask.all()
    assert len(batch.mask) == len(batch.responses) == batch.num_tokens.sum()


def test_every_pair_once_through_and_shuffled_epochs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = stream(tmp_path, tokenizer, PAIRS)
    assert [len(batch) for batch in pairs.batches()] == [2, 2, 1]
    drawn = [
        tuple(prompt.index for step in (0, 1) for prompt in pairs.take(2 * epoch + step).prompts) for epoch in range(4)
    ]
    assert all(len(set(epoch)) == 4 for epoch in drawn)
    assert len(set(drawn)) > 1


def test_invalid_pairs_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ValueError,
        match=r"row 5, column response: prompt and response have \d+ tokens, but data.max_length is 16",
    ):
        stream(tmp_path, tokenizer, [*PAIRS, {"prompt": "1 " * 20, "response": "1"}])
    with pytest.raises(ValueError, match=r"sft.parquet, row 5, column response: a text is expected, not None"):
        stream(tmp_path, tokenizer, [*PAIRS, {"prompt": "1", "response": None}])
    with pytest.raises(ValueError, match=r"no column 'response' \(data.response_key names another\); it has prompt"):
        stream(tmp_path, tokenizer, [{"prompt": "1"}])
