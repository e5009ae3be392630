"""The check of all rows, divided among ranks, finds the same as one rank, and a fault on one rank ends all."""

from pathlib import Path
from typing import Any

import pytest

from megarl.data.config import DataSection, SFTDataSection
from megarl.data.order import Position
from megarl.data.pairs import PairStream
from megarl.data.parquet import write_rows
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import load_tokenizer
from megarl.distributed.exchange import in_shares
from tests.support.ranks import RankPool
from tests.support.sentencepieces import train_sentencepiece

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model"))


def shares(count: int) -> list[list[int]]:
    return in_shares(count, list)


def test_runs_of_equal_length_in_rank_order(pool: RankPool) -> None:
    assert pool.run(3, shares, 7) == [[[0, 1], [2, 3], [4, 5, 6]]] * 3
    assert pool.run(3, shares, 2) == [[[], [0], [1]]] * 3
    assert shares(7) == [[0, 1, 2, 3, 4, 5, 6]]


def first_batch(file: str, model: str, changes: dict[str, Any]) -> tuple[int, list[int]] | str:
    """Return the number of dropped prompts and the rows of the first batch; or the faults."""
    section = DataSection(**{"train_files": file, "max_prompt_length": 12, **changes})
    try:
        dataset = PromptDataset(section, file, load_tokenizer(model))
    except ValueError as error:
        return str(error)
    prompts, _ = PromptStream(dataset, batch_size=4, shuffle=True, seed=1).take(Position())
    return dataset.num_filtered, [prompt.index for prompt in prompts.prompts]


def test_ranks_find_overlong_prompts_together(pool: RankPool, model: str, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "+ " * (40 if number in (3, 7, 8) else 2),
            "data_source": "gsm8k",
            "reward_model": {"ground_truth": "1"},
        }
        for number in range(10)
    ]
    write_rows(tmp_path / "train.parquet", rows)
    file = str(tmp_path / "train.parquet")
    alone = first_batch(file, model, {"filter_overlong_prompts": True})
    assert alone[0] == 3
    assert pool.run(3, first_batch, file, model, {"filter_overlong_prompts": True}) == [alone] * 3
    refused = pool.run(3, first_batch, file, model, {})
    assert refused == [first_batch(file, model, {})] * 3
    named = [f"row {number}, column prompt: the prompt has" for number in (3, 7, 8)]
    assert [words in line for words, line in zip(named, refused[0].splitlines(), strict=True)] == [True] * 3


def pairs(file: str, model: str) -> str:
    section = SFTDataSection(train_files=file, train_batch_size=2, max_length=12)
    try:
        PairStream(section, file, load_tokenizer(model))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_find_overlong_pairs_together(pool: RankPool, model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1", "response": "+ " * (40 if number == 4 else 2)} for number in range(6)]
    write_rows(tmp_path / "sft.parquet", rows)
    refused = pool.run(3, pairs, str(tmp_path / "sft.parquet"), model)
    assert all("sft.parquet, row 4, column response: prompt and response have" in words for words in refused)
