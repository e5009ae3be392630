"""Preference pairs as records: the order of their scores, and invalid pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.config import PreferenceDataSection
from megarl.data.conversations import Conversations
from megarl.data.parquet import write_rows
from megarl.data.preferences import PreferenceStream
from megarl.data.tokenizer import load_tokenizer
from tests.support.sentencepieces import train_sentencepiece

PAIRS = [
    {"prompt": f"{number} 5 =", "chosen": f" {number} + 5", "rejected": f" {number}", "margin": number / 10}
    for number in (1, 22, 3, 4, 55)
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    tokenizer = load_tokenizer(str(train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model")))
    return Conversations(tokenizer=tokenizer, pad_token_id=tokenizer.eos_token_id, max_length=12)


def stream(tmp_path: Path, reader: Conversations, rows: list[dict[str, Any]], **changes: Any) -> PreferenceStream:
    write_rows(tmp_path / "pairs.parquet", rows)
    file = str(tmp_path / "pairs.parquet")
    section = PreferenceDataSection(**{"train_files": file, "train_batch_size": 2, **changes})
    return PreferenceStream(section, file, reader)


def test_pair_is_two_neighbours_with_preferred_first(tmp_path: Path, reader: Conversations) -> None:
    pairs = stream(tmp_path, reader, PAIRS, shuffle=False, margin_key="margin")
    assert (len(pairs), pairs.steps_per_epoch) == (5, 2)
    batch = pairs.take(1)
    texts = ["3 5 = 3 + 5", "3 5 = 3", "4 5 = 4 + 5", "4 5 = 4"]
    assert [prompt.token_ids for prompt in batch.prompts] == [
        reader.tokenizer.encode(text, add_special_tokens=True) for text in texts
    ]
    assert batch.num_tokens.tolist() == [1] * 4
    torch.testing.assert_close(batch.margins, torch.tensor([0.3, 0.3, 0.4, 0.4]))
    assert torch.equal(batch.select(torch.tensor([2, 3])).margins, batch.margins[2:])


def test_without_a_margin_column_margins_are_zero(tmp_path: Path, reader: Conversations) -> None:
    assert not stream(tmp_path, reader, PAIRS).take(0).margins.any()


def test_every_pair_once_through_and_shuffled_epochs(tmp_path: Path, reader: Conversations) -> None:
    pairs = stream(tmp_path, reader, PAIRS)
    assert [len(batch) for batch in pairs.batches()] == [4, 4, 2]
    drawn = [
        tuple(tuple(prompt.token_ids) for step in (0, 1) for prompt in pairs.take(2 * epoch + step).prompts[::2])
        for epoch in range(4)
    ]
    assert all(len(set(epoch)) == 4 for epoch in drawn)
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejected": None}, "row 5, column rejected: a text is expected, not None"),
        ({"chosen": ""}, "row 5, column chosen: the text is empty"),
        ({"margin": None}, r"row 5, column margin: a finite number is expected \(as float32\), not None"),
        ({"margin": float("nan")}, r"row 5, column margin: a finite number is expected \(as float32\), not nan"),
        ({"margin": 1e39}, r"row 5, column margin: a finite number is expected \(as float32\), not 1e\+39"),
    ],
)
def test_invalid_rows_are_named(tmp_path: Path, reader: Conversations, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(tmp_path, reader, [*PAIRS, PAIRS[0] | changes], margin_key="margin")


def test_missing_columns_and_prompts_are_named(tmp_path: Path, reader: Conversations) -> None:
    with pytest.raises(ValueError, match=r"pairs.parquet has no column 'rejected'"):
        stream(tmp_path, reader, [{"prompt": "1", "chosen": "2"}])
    with pytest.raises(ValueError, match="row 0, column prompt: None is neither a text nor a list of messages"):
        stream(tmp_path, reader, [PAIRS[0] | {"prompt": None}] * 2)
