"""Prompts are encoded once a host: its ranks divide the rows, and the next run reads what they kept."""

import os
import socket
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megarl.data.config import DataSection
from megarl.data.order import Position
from megarl.data.parquet import write_rows
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.platform.errors import UserError
from tests.support.ranks import RankPool
from tests.support.sentencepieces import train_sentencepiece

pytestmark = pytest.mark.ranks

NUM_ROWS = 23
DROPPED = (3, 7, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    rows = [
        {"prompt": f"{number} + " * (40 if number in DROPPED else 2), "data_source": "gsm8k"}
        | {"reward_model": {"ground_truth": "1"}}
        for number in range(NUM_ROWS)
    ]
    write_rows(path, rows)
    return str(path)


def read(file: str, model: str, cache: str, ranks_of_host: int) -> tuple[int, list[tuple[int, list[int], str]], int]:
    """Return how many texts this rank encoded, all prompts in order, and the rows that the census counted."""
    encoded = list[str]()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    host, local_rank = divmod(dist.get_rank(), ranks_of_host) if dist.is_initialized() else (0, 0)
    variables = {
        "MEGARL_CACHE": f"{cache}/{host}" if ranks_of_host else cache,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_of_host),
    }
    section = DataSection(train_files=file, max_prompt_length=24, filter_overlong_prompts=True)
    with (
        patch.dict(os.environ, variables),
        patch.object(socket, "gethostname", lambda: f"host-{host}"),
        patch.object(Tokenizer, "encode", counted),
    ):
        dataset = PromptDataset(section, file, load_tokenizer(model))
        stream = PromptStream(dataset, batch_size=None, shuffle=False, seed=1)
        prompts, _ = stream.take(Position())
    return len(encoded), [(p.index, list(p.token_ids), p.text) for p in prompts.prompts], dataset._encoded.counts.rows


@pytest.mark.parametrize("ranks_of_host", [4, 2])
def test_ranks_of_a_host_divide_the_rows(
    pool: RankPool, model: str, file: str, tmp_path: Path, ranks_of_host: int
) -> None:
    _, alone, _ = read(file, model, str(tmp_path / "alone"), 1)
    assert [row for row, _, _ in alone] == [row for row in range(NUM_ROWS) if row not in DROPPED]
    first = pool.run(4, read, file, model, str(tmp_path), ranks_of_host)
    assert [prompts for _, prompts, _ in first] == [alone] * 4
    assert [counted for _, _, counted in first] == [NUM_ROWS] * 4
    of_hosts = [sum(found for found, _, _ in first[host : host + ranks_of_host]) for host in range(0, 4, ranks_of_host)]
    assert of_hosts == [NUM_ROWS] * (4 // ranks_of_host)
    assert max(found for found, _, _ in first) <= -(-NUM_ROWS // ranks_of_host)
    again = pool.run(4, read, file, model, str(tmp_path), ranks_of_host)
    assert again == [(0, alone, NUM_ROWS)] * 4


def test_hosts_may_share_their_cache(pool: RankPool, model: str, file: str, tmp_path: Path) -> None:
    for host in range(2):
        (tmp_path / str(host)).symlink_to(tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    results = pool.run(4, read, file, model, str(tmp_path), 2)
    assert [prompts for _, prompts, _ in results] == [results[0][1]] * 4
    assert len(list((tmp_path / "shared" / "prompts").iterdir())) == 1


def test_host_without_tokens_encodes_alone(pool: RankPool, model: str, file: str, tmp_path: Path) -> None:
    _, alone, _ = read(file, model, str(tmp_path / "1"), 1)
    (tmp_path / "1" / "0").rename(tmp_path / "0")
    results = pool.run(4, read, file, model, str(tmp_path), 2)
    assert [found for found, _, _ in results[:2]] == [0, 0]
    assert sum(found for found, _, _ in results[2:]) == NUM_ROWS
    assert [prompts for _, prompts, _ in results] == [alone] * 4


def first_error(file: str, model: str, cache: str, ranks_of_first: int) -> str:
    """Return the faults on this rank, if the first host has more ranks than the second."""
    is_first = dist.get_rank() < ranks_of_first
    size = ranks_of_first if is_first else dist.get_world_size() - ranks_of_first
    variables = {
        "MEGARL_CACHE": f"{cache}/{is_first}",
        "LOCAL_RANK": str(dist.get_rank() - (0 if is_first else ranks_of_first)),
        "LOCAL_WORLD_SIZE": str(size),
    }
    section = DataSection(train_files=file, max_prompt_length=24)
    with patch.dict(os.environ, variables), patch.object(socket, "gethostname", lambda: f"host-{is_first}"):
        try:
            PromptDataset(section, file, load_tokenizer(model))
        except UserError as error:
            return str(error)
    return ""


def test_hosts_of_unequal_size_agree_on_faults(pool: RankPool, model: str, tmp_path: Path) -> None:
    """The only faulty row is the last one, which the last rank of each host encodes."""
    rows = [{"prompt": "1 + 1", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}} for _ in range(8)]
    rows[7]["prompt"] = "+ " * 40
    write_rows(tmp_path / "train.parquet", rows)
    errors = pool.run(4, first_error, str(tmp_path / "train.parquet"), model, str(tmp_path), 3)
    assert len(set(errors)) == 1 and errors[0].count("row 7, column prompt: the prompt has") == 1
